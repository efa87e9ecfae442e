"""Paged attention in C++ computes what float64 says, whatever the instructions and the threads."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip(
    "halfmoon_engine_native._native", reason="the kernels are not built: make native"
)

from halfmoon_engine_native import _native
from tests.engine.native.paged_batch import PagedBatch, Shape, from_stored, to_stored

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


def test_threads_do_not_change_a_ragged_batch(instruction_set: str, n_threads: int) -> None:
    check(instruction_set, Shape([*MIXED, (2_000, 1), (1_000, 200)], head_dim=40, window=900))


def test_one_token_alone_is_its_own_value(instruction_set: str, n_threads: int) -> None:
    batch = PagedBatch(Shape([(0, 1)], n_shared=1))
    batch.write()
    np.testing.assert_allclose(batch.attend()[0], batch.values[0][0], rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 17, 33, 40])
@pytest.mark.parametrize("run", [(47, 1), (8, 40)])
def test_nothing_is_read_behind_it(
    instruction_set: str, dtype: str, head_dim: int, run: tuple[int, int]
) -> None:
    # The run's last value is the last of the memory: a page without access follows.
    check(instruction_set, Shape([run], dtype, head_dim, n_kv_heads=1))


def test_an_empty_batch_does_nothing(instruction_set: str) -> None:
    batch = PagedBatch(Shape([(0, 1)]))
    nothing = np.zeros(0, np.int64)
    empty = _native.Batch(batch.pool, nothing, nothing, nothing, np.zeros(0, np.int32))
    none = np.zeros((0, 4, 64), np.float32)
    _native.write_kv(empty, 0, none, none)
    _native.attend(empty, 0, none, none, 4, 1.0)


def test_scores_far_apart_neither_overflow_nor_vanish(instruction_set: str) -> None:
    batch = PagedBatch(Shape([(200, 1), (0, 50)], head_dim=32))
    for keys in batch.keys:
        keys *= 300.0
    batch._store_earlier_tokens()
    batch.write()
    assert np.abs(batch.attend() - batch.expected()).max() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_later_token_does_not_change_an_earlier_one(instruction_set: str, dtype: str) -> None:
    one = PagedBatch(Shape([(100, 60)], dtype), seed=1)
    one.write()
    before = one.attend()
    for rows in (one.keys[0], one.values[0]):
        rows[130:] = 5.0
    one.write()
    after = one.attend()
    assert np.array_equal(before[:30], after[:30])
    assert not np.array_equal(before[30:], after[30:])


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


def test_a_write_touches_its_own_slots_only(instruction_set: str) -> None:
    batch = PagedBatch(Shape([(17, 1), (0, 30)], "float16", n_kv_heads=3))
    before = batch.pages.view(np.uint16).copy()
    batch.write()
    changed = (before != batch.pages.view(np.uint16)).any(axis=(4, 5))
    assert changed.sum() == 2 * batch.shape.n_tokens
    assert not changed[:, 0].any()
