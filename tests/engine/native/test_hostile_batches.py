"""Batches, pools and calls of any content are computed or refused; none ends the process."""

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip(
    "halfmoon_engine_native._native", reason="the kernels are not built: make native"
)

from halfmoon_engine_native import _native
from tests.engine.native.paged_batch import guarded

N_PAGES, BLOCK_SIZE, HEADS, HEAD_DIM = 6, 16, 2, 8
REFUSED = (ValueError, OverflowError, TypeError, BufferError)


def make_pool() -> Any:
    memory = guarded(N_PAGES * 2 * 2 * BLOCK_SIZE * HEADS * HEAD_DIM * 4)
    return _native.Pool(memory, "float32", 2, BLOCK_SIZE, HEADS, HEAD_DIM)


def make_batch(lengths: list[int], starts: list[int], n_pages: list[int], pages: list[int]) -> Any:
    a, b, c = (np.array(each, np.int64) for each in (lengths, starts, n_pages))
    return _native.Batch(make_pool(), a, b, c, np.array(pages, np.int32))


@pytest.mark.parametrize(
    ("lengths", "starts", "n_pages", "pages"),
    [
        ([0], [0], [1], [0]), ([-1], [0], [1], [0]), ([1], [-1], [1], [0]), ([1], [0], [-1], [0]),
        ([1], [0], [1], [N_PAGES]), ([1], [0], [1], [-1]), ([17], [0], [1], [0]),
        ([1], [16], [1], [0]), ([1], [0], [2], [0]), ([1, 1], [0, 0], [1, 1], [0]),
        ([1], [2**63 - 1], [1], [0]), ([2**63 - 1], [2**63 - 1], [1], [0]),
        ([2**62], [0], [2**62], [0]), ([1], [0], [2**63 - 1], [0]),
    ],
)  # fmt: skip
def test_a_run_that_its_pages_cannot_hold_is_refused(
    lengths: list[int], starts: list[int], n_pages: list[int], pages: list[int]
) -> None:
    with pytest.raises(ValueError, match="run"):
        make_batch(lengths, starts, n_pages, pages)


def test_lists_of_unequal_lengths_or_of_broken_numbers_are_refused() -> None:
    for lengths, starts, n_pages in (([1, 1], [0], [1]), ([1], [0, 0], [1]), ([1], [0], [1, 1])):
        with pytest.raises(ValueError, match="bytes"):
            make_batch(lengths, starts, n_pages, [0, 1])
    one = np.ones(1, np.int64)
    for broken in (np.zeros(12, np.uint8), np.zeros(4, np.uint8)):
        with pytest.raises(ValueError, match=r"lengths|starts|n_pages"):
            _native.Batch(make_pool(), broken, broken, broken, np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="pages"):
        _native.Batch(make_pool(), one, one * 0, one, np.zeros(6, np.uint8))


@pytest.mark.parametrize("change", [-4, 4, -1, None])
def test_buffers_of_another_size_are_refused(change: int | None) -> None:
    batch = make_batch([3], [0], [1], [0])
    right = 3 * HEADS * HEAD_DIM * 4
    good = np.zeros(right, np.uint8)
    bad = np.zeros(0 if change is None else right + change, np.uint8)
    for keys, values in ((good, bad), (bad, good)):
        with pytest.raises(ValueError, match="bytes"):
            _native.write_kv(batch, 0, keys, values)
        with pytest.raises(ValueError, match="bytes"):
            _native.attend(batch, 0, keys, values, HEADS, 1.0)
    with pytest.raises(ValueError, match="sinks"):
        _native.attend(batch, 0, good, good.copy(), HEADS, 1.0, 0, 0.0, np.zeros(1, np.float32))


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": 2}, {"layer": -1}, {"n_heads": 0}, {"n_heads": -2}, {"n_heads": 3},
        {"window": -1}, {"softcap": -1.0}, {"softcap": float("nan")},
    ],
)  # fmt: skip
def test_a_call_with_impossible_numbers_or_read_only_results_fails(changes: dict[str, Any]) -> None:
    batch = make_batch([1], [0], [1], [0])
    queries = np.zeros((1, HEADS, HEAD_DIM), np.float32)
    given = {"layer": 0, "n_heads": HEADS, "scale": 1.0} | changes
    with pytest.raises(ValueError, match=r"layer|heads|window"):
        _native.attend(batch, queries=queries, out=queries.copy(), **given)
    with pytest.raises((ValueError, BufferError)):
        _native.attend(batch, 0, queries, bytes(queries.nbytes), HEADS, 1.0)


def test_a_pool_of_huge_pages_unknown_instructions_and_numbers_of_threads_are_refused() -> None:
    huge = 2**31 - 1
    with pytest.raises(ValueError, match="memory"):
        _native.Pool(np.zeros(64, np.uint8), "float32", huge, huge, huge, 1024)
    with pytest.raises(ValueError, match="mmx"):
        _native.use_instruction_set("mmx")
    for n in (0, -1, 257, 2**40):
        with pytest.raises(REFUSED):
            _native.set_threads(n)


anything = st.one_of(st.integers(-3, 40), st.integers(-(2**63), 2**63 - 1))
small = st.one_of(st.integers(-1, 40), st.integers(-(2**31), 2**31 - 1))


@settings(max_examples=300, deadline=None)
@given(
    runs=st.lists(st.tuples(anything, anything, anything), max_size=4),
    pages=st.lists(small, max_size=12),
    n_heads=small,
    layer=small,
    window=anything,
    n_floats=st.integers(0, 4000),
    softcap=st.floats(width=32),
    scale=st.floats(width=32),
)
def test_any_numbers_are_computed_or_refused(
    runs: list[tuple[int, int, int]],
    pages: list[int],
    n_heads: int,
    layer: int,
    window: int,
    n_floats: int,
    softcap: float,
    scale: float,
) -> None:
    columns = [[run[i] for run in runs] for i in range(3)]
    try:
        batch = make_batch(columns[0], columns[1], columns[2], pages)
    except REFUSED:
        return
    assert batch.n_tokens == sum(columns[0])
    for n in (batch.n_tokens * HEADS * HEAD_DIM, n_floats):
        numbers = guarded(n * 4).view(np.float32)
        with contextlib.suppress(*REFUSED):
            _native.write_kv(batch, layer, numbers, numbers)
        for heads in (HEADS, n_heads):
            with contextlib.suppress(*REFUSED):
                _native.attend(batch, layer, numbers, numbers.copy(), heads, scale, window, softcap)


@settings(max_examples=300, deadline=None)
@given(
    n_bytes=st.integers(0, 5000),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float8", ""]),
    sizes=st.tuples(small, small, small, small),
)
def test_a_pool_is_made_or_refused(
    n_bytes: int, dtype: str, sizes: tuple[int, int, int, int]
) -> None:
    memory = guarded(n_bytes)
    try:
        pool = _native.Pool(memory, dtype, *sizes)
    except REFUSED:
        return
    n_layers, block_size, n_kv_heads, head_dim = sizes
    number = 4 if dtype == "float32" else 2
    page = 2 * n_layers * block_size * n_kv_heads * head_dim * number
    assert pool.n_pages == n_bytes // page > 0


@pytest.mark.parametrize(
    ("pages", "n_pages"),
    [
        ([[0], [1, 6]], 6), ([[-1]], 6), ([[2**70]], 6), ([["a"]], 6), ([[0.5]], 6), ([0], 6),
        (7, 6), ([[0]], 0), ([[0]], -1), ([[0]], 2**31),
    ],
)  # fmt: skip
def test_pages_outside_of_the_pool_are_not_joined(pages: Any, n_pages: int) -> None:
    with pytest.raises(REFUSED):
        _native.join_pages(pages, n_pages)


@given(pages=st.lists(st.lists(st.integers(0, 2**31 - 2)), max_size=5))
def test_pages_are_joined_in_order(pages: list[list[int]]) -> None:
    joined = np.frombuffer(_native.join_pages(pages, 2**31 - 1), np.int32)
    assert joined.tolist() == [page for run in pages for page in run]
