"""What the profile of a forward compares the time of each part with."""

import pytest

from benchmarks.engine.part_limits import GROUPS, Pass, Work, limits, passes_of
from benchmarks.engine.rows import Ceilings, DecodeRow, PrefillRow
from benchmarks.engine.shapes import ModelShape

#: 2 layers, hidden 4, 2 heads of 2 over one of keys, an MLP of 8, 10 tokens.
TINY = ModelShape("tiny", "llama", 2, 4, 2, 1, 2, 8, 10, tied=False)
#: One second for each operation, none for memory; and the other way round.
PRODUCTS, MEMORY = Ceilings(1.0, 1e30), Ceilings(1e30, 1.0)


def test_a_prompt_is_cut_into_chunks_of_which_the_last_one_draws() -> None:
    assert passes_of(PrefillRow(5), 2) == [
        Pass(1, 2, 0, False),
        Pass(1, 2, 2, False),
        Pass(1, 1, 4, True),
    ]
    assert passes_of(DecodeRow(3, 7), 2) == [Pass(3, 1, 7, True)]


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


def test_the_ceiling_that_takes_longer_bounds_a_part() -> None:
    most = Ceilings(flops_per_s=10.0, bytes_per_s=5.0)
    assert Work(n_bytes=10, flops=10).seconds(most) == (2.0, "memory")
    assert Work(n_bytes=10, flops=50).seconds(most) == (5.0, "products")
