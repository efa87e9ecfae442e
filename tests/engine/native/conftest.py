"""What each test of the kernels runs with: every instruction set of this processor."""

from collections.abc import Iterator

import pytest

try:
    from halfmoon_engine_native import _native

    INSTRUCTION_SETS: tuple[str, ...] = _native.instruction_sets()
except ImportError:  # the tests' files say that they are skipped
    INSTRUCTION_SETS = ()


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.instruction_set()
    _native.use_instruction_set(request.param)
    yield request.param
    _native.use_instruction_set(before)


@pytest.fixture(params=[1, 2, 4], ids=lambda n: f"{n}_threads")
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = _native.threads()
    _native.set_threads(request.param)
    yield request.param
    _native.set_threads(before)
