"""What the comparison with vLLM's engine counts and shows, and a forward's profile of its parts."""

import sys
from pathlib import Path

import pytest

from benchmarks.engine import runner_process
from benchmarks.engine.part_limits import GROUPS, Pass, limits, passes_of
from benchmarks.engine.rows import (
    Ceilings,
    DecodeRow,
    MeasuredRow,
    PrefillRow,
    comparison_table,
    memory_rows,
    pool_sequences,
)
from benchmarks.engine.runner_process import RunnerFailed
from benchmarks.engine.shapes import SHAPES, ModelShape

#: 2 layers, each of 4·(2·4 + 2·2) + 3·4·8 = 144 parameters, and a head of 10·4.
TINY = ModelShape("tiny", "llama", 2, 4, 2, 1, 2, 8, 10, tied=False)


def test_a_step_reads_all_weights_once_and_the_kv_of_each_request() -> None:
    weights = 2 * 144 + 10 * 4
    kv_token = 2 * 2 * 2
    assert TINY.decode_bytes(3, 5, "float32") == 4 * (weights + 3 * 5 * kv_token)
    assert TINY.decode_bytes(3, 5, "bfloat16") == 2 * (weights + 3 * 5 * kv_token)
    # An untied embedding is held, but not read.
    assert TINY.parameters - TINY.read_parameters == 10 * 4
    tied = SHAPES["qwen3-0.6b"]
    assert tied.parameters == tied.read_parameters


Seconds = dict[tuple[str, MeasuredRow], list[float]]


def compared(
    rows: tuple[MeasuredRow, ...],
    seconds: Seconds,
    most: Ceilings | None = None,
    systems: tuple[str, ...] = ("ours", "theirs"),
) -> list[str]:
    """Rows of the comparison."""
    table = comparison_table(rows, systems, seconds, TINY, "float32", most, beside="theirs")
    return table.splitlines()[2:]


def test_a_row_is_a_figure_for_each_system_and_a_ratio_above_one_where_ours_is_faster() -> None:
    prefill, decode = PrefillRow(1000), DecodeRow(4, 512)
    seconds: Seconds = {("ours", prefill): [0.4, 0.5, 9.0], ("theirs", prefill): [1.0]}
    seconds |= {("ours", decode): [0.02], ("theirs", decode): [0.01]}
    assert compared((prefill, decode), seconds) == [
        "| prefill 1,000, tokens/s | 2,000 | 1,000 | 2.00 |",
        "| decode 4 × 512, ms a step | 20.0 | 10.0 | 0.50 |",
    ]


def test_shares_are_of_the_product_in_prefill_and_of_reading_in_decode() -> None:
    prefill, decode = PrefillRow(3), DecodeRow(2, 8)
    bytes_per_s = 2 * TINY.decode_bytes(2, 16, "float32")
    most = Ceilings(flops_per_s=4 * TINY.prefill_flops(3), bytes_per_s=bytes_per_s)
    seconds: Seconds = {("ours", prefill): [1.0], ("ours", decode): [1.0]}
    rows = compared((prefill, decode), seconds, most, ("ours",))
    assert [row.split(" | ")[-1] for row in rows] == ["0.25 |", "0.50 |"]


def test_what_was_not_measured_is_a_dash() -> None:
    (row,) = compared((PrefillRow(8),), {("ours", PrefillRow(8)): [1.0]}, Ceilings(1e9, 1e9))
    assert row.startswith("| prefill 8, tokens/s | 8 | – | – |") and row.endswith(" | – |")
    assert memory_rows(("ours", "theirs"), {"ours": 3 << 20}, {}, 8).splitlines()[2:] == [
        "| after the start | 3 | – |",
        "| most in prefill 8 | – | – |",
    ]


def test_the_pool_holds_the_largest_row_with_the_tokens_that_it_makes() -> None:
    rows = (PrefillRow(4000), DecodeRow(16, 512), DecodeRow(1, 512))
    sequences = pool_sequences(rows)
    assert len(sequences) == 16
    assert min(sequences) > 512
    assert pool_sequences((PrefillRow(9000), DecodeRow(1, 512))) == (9001,)


def test_a_runner_that_ends_is_reported_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("import sys; sys.exit('no such processor')")
    (tmp_path / "echo.py").write_text(
        "import json, sys\nprint('{}', flush=True)\n"
        "for line in sys.stdin: print(json.dumps({'error': 'too large'}), flush=True)\n"
    )
    monkeypatch.setattr(runner_process, "PROGRAMS", tmp_path)

    def start(program: str) -> runner_process.RunnerProcess:
        return runner_process.RunnerProcess(Path(sys.executable), program, {}, {}, tmp_path / "log")

    with start("broken.py") as broken, pytest.raises(RunnerFailed, match="no such processor"):
        broken.ready(60)
    with start("echo.py") as echo:
        assert echo.ready(60) == {}
        with pytest.raises(RunnerFailed, match="too large"):
            echo.ask({"op": "prefill"}, 60)


# -- limits of a forward's parts -------------------------------------------------------------------

#: One second for each operation, none for memory; and the other way round.
PRODUCTS, MEMORY = Ceilings(1.0, 1e30), Ceilings(1e30, 1.0)


def test_the_operations_of_a_step_are_those_of_its_matrices_and_of_its_attention() -> None:
    found = limits(TINY, "float32", passes_of(DecodeRow(3, 7), 2048), PRODUCTS)
    matrices = sum(found[group].seconds for group in ("QKV", "out", "up", "down"))
    assert matrices == pytest.approx(2 * 3 * 2 * TINY.layer_parameters)
    assert found["head"].seconds == pytest.approx(2 * 3 * 10 * 4)
    # Each of 3 tokens sees 8, in 2 layers and 2 heads: two products of 2 numbers each.
    assert found["attention"].seconds == pytest.approx(3 * 8 * 2 * 2 * (2 * 2 * 2))


def test_in_the_last_layer_only_drawn_rows_go_on_behind_their_keys() -> None:
    found = limits(TINY, "float32", [Pass(1, 5, 0, True)], PRODUCTS)
    assert found["QKV"].seconds == pytest.approx(2 * 2 * 4 * 8 * 5)
    assert found["out"].seconds == pytest.approx(2 * 4 * 4 * (5 + 1))
    pairs = 5 * 6 // 2 + 5
    assert found["attention"].seconds == pytest.approx(4 * 2 * 2 * pairs)
    assert "head" not in limits(TINY, "float32", [Pass(1, 5, 0, False)], PRODUCTS)


def test_a_step_reads_weights_once_and_the_kv_of_each_request() -> None:
    found = limits(TINY, "bfloat16", passes_of(DecodeRow(3, 7), 2048), MEMORY)
    read = sum(found[group].seconds for group in GROUPS if group != "norms, rotary, KV write")
    assert read == pytest.approx(TINY.decode_bytes(3, 8, "bfloat16"))
