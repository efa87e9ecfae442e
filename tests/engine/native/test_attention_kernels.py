"""Paged attention in C++ computes what float64 says, or refuses the call; none ends the process."""

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip(
    "halfmoon_engine_native._native", reason="the kernels are not built: make native"
)

from halfmoon_engine_native import _native
from tests.engine.native.paged_batch import PagedBatch, Shape, from_stored, guarded, to_stored

DTYPES = ("float32", "bfloat16", "float16")
MIXED = ((0, 1), (700, 1), (0, 90), (300, 5), (64, 33))


def tolerance(instruction_set: str, dtype: str) -> float:
    """Errors of sums in float32; products of bfloat16 pairs round queries and weights too."""
    return 2e-2 if (instruction_set, dtype) == ("avx512_bf16", "bfloat16") else 2e-5


def check(instruction_set: str, shape: Shape, seed: int = 0) -> None:
    batch = PagedBatch(shape, seed)
    batch.write()
    error = np.abs(batch.attend() - batch.expected()).max()
    assert error < tolerance(instruction_set, shape.dtype), shape


FORMS: list[dict[str, Any]] = [
    *({"head_dim": size} for size in (32, 33, 40, 64, 80, 96, 128, 256)),
    *({"n_kv_heads": 1, "n_shared": n} for n in (1, 2, 3, 4, 7, 8, 20)),
    *({"n_kv_heads": 3, "n_shared": n, "head_dim": 32} for n in (1, 2, 3, 4, 7, 8, 20)),
    *({"block_size": size} for size in (1, 5, 16, 24, 128, 512)),
    *({"window": n} for n in (1, 2, 31, 64, 100, 10_000)),
    *(
        {"window": window, "softcap": softcap, "sinks": softcap in (0.0, 5.0)}
        for window in (0, 40)
        for softcap in (20.0, 0.0, 5.0, 1e6, 1e30, 3e38)
    ),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_is_computed(instruction_set: str, dtype: str, form: dict[str, Any]) -> None:
    check(instruction_set, Shape(MIXED, dtype, **form))


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_contexts_are_split_and_merged(
    instruction_set: str, n_threads: int, dtype: str
) -> None:
    check(instruction_set, Shape([(32_767, 1)], dtype, head_dim=32, n_kv_heads=1, block_size=64))
    check(instruction_set, Shape([(4_000, 20), (3_000, 1)], dtype, sinks=True, block_size=32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 17, 33, 40])
@pytest.mark.parametrize("run", [(47, 1), (8, 40)])
def test_nothing_is_read_behind_it(
    instruction_set: str, dtype: str, head_dim: int, run: tuple[int, int]
) -> None:
    # The run's last value is the last of the memory: a page without access follows.
    check(instruction_set, Shape([run], dtype, head_dim, n_kv_heads=1))


def test_scores_far_apart_neither_overflow_nor_vanish(instruction_set: str) -> None:
    batch = PagedBatch(Shape([(200, 1), (0, 50)], head_dim=32))
    for keys in batch.keys:
        keys *= 300.0
    batch._store_earlier_tokens()
    batch.write()
    assert np.abs(batch.attend() - batch.expected()).max() < 1e-3


shapes = st.builds(
    Shape,
    runs=st.lists(
        st.tuples(st.integers(0, 700), st.one_of(st.just(1), st.integers(1, 150))),
        min_size=1,
        max_size=5,
    ),
    dtype=st.sampled_from(DTYPES),
    head_dim=st.integers(1, 160),
    n_kv_heads=st.integers(1, 4),
    n_shared=st.integers(1, 9),
    block_size=st.integers(1, 70),
    window=st.one_of(st.just(0), st.integers(1, 800)),
    softcap=st.sampled_from([0.0, 0.0, 15.0]),
    sinks=st.booleans(),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(shape=shapes, seed=st.integers(0, 1000), threads=st.sampled_from([1, 2, 4]))
def test_any_shape_is_computed(instruction_set: str, shape: Shape, seed: int, threads: int) -> None:
    _native.set_threads(threads)
    check(instruction_set, shape, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [(1, 33), (2, 64), (8, 128)])
def test_new_keys_are_rounded_to_nearest_even(
    instruction_set: str, n_threads: int, dtype: str, width: tuple[int, int]
) -> None:
    shape = Shape([(5, 3), (0, 300), (40, 1)], dtype, width[1], width[0], 1)
    batch = PagedBatch(shape)
    rng = np.random.default_rng(2)
    for rows in (*batch.keys, *batch.values):
        # All exponents, exact ties among them; every special number too.
        bits = rng.integers(0, 2**32, rows.shape, np.uint32)
        bits &= rng.choice(np.array([0xFFFFFFFF, 0xFFFF8000, 0xFFFFF000], np.uint32), rows.shape)
        rows[...] = bits.view(np.float32)
        rows.reshape(-1)[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-41]
    batch.write()
    for i, (before, _) in enumerate(shape.runs):
        for side, rows in enumerate((batch.keys[i], batch.values[i])):
            expected = from_stored(to_stored(rows[before:], dtype), dtype)
            np.testing.assert_array_equal(batch.stored(i, side)[before:], expected)


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
