"""What the comparison with vLLM's engine counts and shows."""

import sys
from pathlib import Path

import pytest

from benchmarks.cluster import Timing
from benchmarks.engine import runner_process
from benchmarks.engine.rows import (
    Ceilings,
    DecodeRow,
    MeasuredRow,
    PrefillRow,
    comparison_table,
    conversion_table,
    memory_rows,
    pool_sequences,
)
from benchmarks.engine.runner_process import RunnerFailed
from benchmarks.engine.shapes import SHAPES, ModelShape
from benchmarks.engine.ttft_reuse import reuse_table

#: 2 layers, each of 4·(2·4 + 2·2) + 3·4·8 = 144 parameters, and a head of 10·4.
TINY = ModelShape("tiny", "llama", 2, 4, 2, 1, 2, 8, 10, tied=False)


def test_a_prompt_takes_two_operations_per_parameter_and_token_and_those_of_attention() -> None:
    matrices = 2 * 2 * 144 * 3
    # Tokens 1, 2 and 3 read 1, 2 and 3 tokens: 6 pairs in 2 layers and 2 heads, of 2·2·2 each.
    attention = 2 * 2 * 6 * 8
    head = 2 * 10 * 4
    assert TINY.prefill_flops(3) == matrices + attention + head


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


def test_copies_to_the_pools_layout_are_shown_beside_the_time_that_they_are_a_part_of() -> None:
    prefill, decode = PrefillRow(2048), DecodeRow(4, 512)
    seconds: Seconds = {("ours", prefill): [0.4, 0.5, 9.0], ("theirs", prefill): [1.0]}
    converting: Seconds = {("ours", prefill): [0.1, 0.01, 0.0]}
    assert conversion_table((prefill, decode), seconds, converting).splitlines() == [
        "| copies to the pool's layout | ours, ms | of its time |",
        "|---|---|---|",
        "| prefill 2,048 | 10.00 | 2.0% |",
        "| decode 4 × 512 | – | – |",
    ]


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


def test_a_repeated_prompt_is_shown_as_times_faster() -> None:
    misses = {"ours": [Timing(2.0, 0.1, 0), Timing(4.0, 0.1, 0), Timing(2.0, 0.1, 0)]}
    hits = {"ours": [Timing(0.05, 0.1, 4032)]}
    row = reuse_table("tiny", "float32", misses, hits).splitlines()[-1]
    assert row == "| ours | 2,000 ms | 50.0 ms | 40 | 4,032 |"


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
