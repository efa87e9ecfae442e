"""The dice of a fuzzer, and which input it was that failed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest

from halfmoon_testing.fuzz_inputs import fuzz_random


@pytest.fixture
def dice() -> Random:
    """Of the run's seed, which is printed."""
    return fuzz_random()


@contextmanager
def noted(what: str | Callable[[], str]) -> Iterator[None]:
    """Note which input it was on whatever is raised here."""
    try:
        yield
    except BaseException as error:
        error.add_note(what if isinstance(what, str) else what())
        raise
