"""Compare packed and row-major linears with float64, on each instruction set of this machine."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

native: Any = pytest.importorskip(
    "halfmoon_engine_native._native", reason="halfmoon-engine-native is not installed"
)

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Function = Callable[[Doubles], Doubles]

DTYPES = ("float32", "bfloat16", "float16")
EPSILON = 2.0**-23
#: No activation is steeper, but relu2.
STEEPEST = 1.2

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _silu(v: Doubles) -> Doubles:
    result: Doubles = v / (1 + np.exp(-v))
    return result


def _gelu_tanh(v: Doubles) -> Doubles:
    result: Doubles = 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
    return result


ACTIVATIONS: dict[str, Function] = {
    "none": lambda v: v,
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": lambda v: 0.5 * v * (1 + _erf(v / math.sqrt(2))),
    "relu": lambda v: np.maximum(v, 0),
    "relu2": lambda v: np.maximum(v, 0) ** 2,
}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    isa, n_threads = native.instruction_set(), native.threads()
    yield
    native.use_instruction_set(isa)
    native.set_threads(n_threads)


def round_to_bfloat16(numbers: Floats) -> Floats:
    words = numbers.view(np.uint32)
    rounded = (words + 0x7FFF + ((words >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def stored(weights: Floats, dtype: str) -> tuple[NDArray[Any], Floats]:
    """Return the weights as a checkpoint holds them, and their values."""
    if dtype == "float16":
        return weights.astype(np.float16), weights.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        rounded = round_to_bfloat16(weights)
        return (rounded.view(np.uint32) >> 16).astype(np.uint16), rounded
    return weights, weights


def as_kernels_see(x: Floats, dtype: str, isa: str) -> Floats:
    return round_to_bfloat16(x) if dtype == "bfloat16" and isa == "avx512_bf16" else x


def sums_and_bounds(x: Floats, weights: Floats) -> tuple[Doubles, Doubles]:
    """Return x·Wᵀ, and how far sums in float32 may be from it in any order."""
    exact_x, exact_w = x.astype(np.float64), weights.astype(np.float64)
    sizes = np.abs(exact_x) @ np.abs(exact_w).T
    return exact_x @ exact_w.T, (x.shape[1] + 4) * EPSILON * sizes + 1e-30


def activated(
    sums: Doubles, bounds: Doubles, activation: str, gated: bool
) -> tuple[Doubles, Doubles]:
    """Return what the kernel should store, and how far it may be off."""
    n = sums.shape[1] // 2 if gated else sums.shape[1]
    gate, off = sums[:, :n], bounds[:, :n]
    result = ACTIVATIONS[activation](gate)
    off = off * 2 * (np.abs(gate) + off) if activation == "relu2" else off * STEEPEST
    off = off + 4 * EPSILON * (np.abs(gate) + np.abs(result))
    if gated:
        up, up_off = sums[:, n:], bounds[:, n:]
        result, off = result * up, np.abs(result) * up_off + off * (np.abs(up) + up_off)
    return result, off + EPSILON * np.abs(result)


def numbers(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_right(
    isa: str,
    dtype: str,
    n_out: int,
    n_in: int,
    n_rows: int,
    *,
    gated: bool = False,
    activation: str = "none",
    biased: bool = False,
    accumulate: bool = False,
    multiplier: float = 1.0,
) -> None:
    native.use_instruction_set(isa)
    weights, values = stored(numbers(1, n_out, n_in), dtype)
    x, bias = numbers(2, n_rows, n_in), numbers(3, n_out)
    y = numbers(4, n_rows, n_out // 2 if gated else n_out)
    before = y.astype(np.float64)
    linear = native.Linear(weights, dtype, n_out, n_in, bias if biased else None, gated)
    linear.run(x, y, n_rows, activation, accumulate, multiplier)

    sums, bounds = sums_and_bounds(as_kernels_see(x, dtype, isa), values)
    if biased:
        sums, bounds = sums + bias, bounds + EPSILON * (np.abs(sums) + np.abs(bias))
    result, off = activated(sums, bounds, activation, gated)
    wanted = multiplier * result + (before if accumulate else 0)
    limit = abs(multiplier) * off + 2 * EPSILON * (np.abs(wanted) + np.abs(before))
    assert np.all(np.abs(y - wanted) <= limit), np.max(np.abs(y - wanted) / limit)


SIZES = st.one_of(
    st.integers(1, 70), st.sampled_from([127, 128, 255, 256, 257, 511, 512, 513, 1030])
)


@settings(max_examples=150, deadline=None)
@given(
    isa=st.sampled_from(native.instruction_sets()),
    dtype=st.sampled_from(DTYPES),
    n_columns=SIZES,
    n_in=SIZES,
    n_rows=st.one_of(st.integers(1, 40), st.sampled_from([130, 256, 257, 400])),
    gated=st.booleans(),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    biased=st.booleans(),
    accumulate=st.booleans(),
    multiplier=st.sampled_from([1.0, 0.25, -3.0]),
    n_threads=st.sampled_from([1, 2, 4]),
)
def test_a_packed_linear_of_any_shape_is_right(
    isa: str, dtype: str, n_columns: int, n_in: int, n_rows: int, n_threads: int, **options: Any
) -> None:
    native.set_threads(n_threads)
    n_out = 2 * n_columns if options["gated"] else n_columns
    assert_right(isa, dtype, n_out, n_in, n_rows, **options)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "row-major"])
@pytest.mark.parametrize("isa", native.instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gives_the_same_bits_in_any_batch(isa: str, dtype: str, packed: bool) -> None:
    native.use_instruction_set(isa)
    native.set_threads(2)
    n_out, n_in, n_most = (70, 1030, 300) if packed else (67, 150, 40)
    weights, _ = stored(numbers(1, n_out, n_in), dtype)
    linear = native.Linear(weights, dtype, n_out, n_in)
    x = numbers(2, n_most, n_in)

    def results(n_rows: int) -> Floats:
        y = np.zeros((n_rows, n_out), np.float32)
        if packed:
            linear.run(x[:n_rows], y, n_rows)
        else:
            native.linear_unpacked(weights, dtype, n_out, n_in, x[:n_rows], y, n_rows)
        return y

    many = results(n_most)
    for n_rows in (1, 2, 7, 16, 33, 200) if packed else (*range(1, 18), 33):
        assert np.array_equal(results(n_rows), many[:n_rows])


@pytest.mark.parametrize("isa", native.instruction_sets())
def test_many_rows_of_one_call_are_not_those_of_the_call_before(isa: str) -> None:
    native.use_instruction_set(isa)
    native.set_threads(3)
    linear = native.Linear(numbers(1, 300, 40), "float32", 300, 40)
    many, few = np.zeros((300, 300), np.float32), np.zeros((1, 300), np.float32)
    for seed in range(60):  # which thread begins with which rows differs from call to call
        x = numbers(seed, 300, 40)
        linear.run(x, many, 300)
        for row in (0, 150, 299):
            linear.run(x[row : row + 1], few, 1)
            assert np.array_equal(few[0], many[row])


@settings(max_examples=100, deadline=None)
@given(
    isa=st.sampled_from(native.instruction_sets()),
    dtype=st.sampled_from(DTYPES),
    n_out=SIZES,
    n_in=SIZES,
    n_rows=st.integers(1, 70),
    n_threads=st.sampled_from([1, 2, 4]),
)
def test_a_row_major_linear_of_any_shape_is_right(
    isa: str, dtype: str, n_out: int, n_in: int, n_rows: int, n_threads: int
) -> None:
    native.use_instruction_set(isa)
    native.set_threads(n_threads)
    weights, values = stored(numbers(1, n_out, n_in), dtype)
    x, y = numbers(2, n_rows, n_in), np.zeros((n_rows, n_out), np.float32)
    native.linear_unpacked(weights, dtype, n_out, n_in, x, y, n_rows)
    sums, bounds = sums_and_bounds(as_kernels_see(x, dtype, isa), values)
    assert np.all(np.abs(y - sums) <= bounds)


@pytest.mark.parametrize(
    ("n_out", "n_in"), [(0, 4), (4, 0), (-4, 4), (-2, -8), (2**62, 4), (2**32, 2**32), (5, 4)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_sizes_that_the_weights_do_not_have_are_refused(n_out: int, n_in: int, gated: bool) -> None:
    with pytest.raises(ValueError, match=r"bytes|linear of"):
        native.Linear(numbers(1, 4, 4), "float32", n_out, n_in, None, gated)


def test_an_unknown_dtype_and_an_odd_gated_linear_are_refused() -> None:
    for dtype in ("", "float64", "BFLOAT16", "flo"):
        with pytest.raises(ValueError, match="known are"):
            native.Linear(numbers(1, 4, 4), dtype, 4, 4)
    with pytest.raises(ValueError, match="gated linear of 3"):
        native.Linear(numbers(1, 3, 4), "float32", 3, 4, None, True)


@settings(max_examples=200, deadline=None)
@given(
    n_x=st.integers(0, 40),
    n_y=st.integers(0, 40),
    n_bias=st.integers(0, 8),
    n_rows=st.one_of(st.integers(-3, 6), st.sampled_from([2**31, 2**61, 2**63 - 1, -(2**63)])),
)
def test_buffers_of_another_size_are_refused(n_x: int, n_y: int, n_bias: int, n_rows: int) -> None:
    n_out, n_in = 4, 5
    weights = numbers(1, n_out, n_in)
    if n_bias != n_out:
        with pytest.raises(ValueError, match="bias"):
            native.Linear(weights, "float32", n_out, n_in, numbers(2, n_bias))
    linear = native.Linear(weights, "float32", n_out, n_in)
    x, y = numbers(3, n_x), numbers(4, n_y)
    if n_x == n_rows * n_in and n_y == n_rows * n_out:
        linear.run(x, y, n_rows)
        native.linear_unpacked(weights, "float32", n_out, n_in, x, y, n_rows)
        return
    with pytest.raises(ValueError, match="bytes"):
        linear.run(x, y, n_rows)
    with pytest.raises(ValueError, match="bytes"):
        native.linear_unpacked(weights, "float32", n_out, n_in, x, y, n_rows)
