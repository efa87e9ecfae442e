"""What holds after each test of simulated clusters."""

import gc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest


def _regions() -> list[str]:
    """Memory of transfer engines that this process has mapped as files."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(entry.readlink()))
    return [target for target in found if "memfd:halfmoon" in target]


@pytest.fixture(autouse=True)
def no_region_is_left() -> Iterator[None]:
    if _regions():  # of tests elsewhere
        gc.unfreeze()
        gc.collect()
    # What is there before a test is left out of its collections, for good: seconds of each.
    gc.freeze()
    yield
    gc.collect()
    assert not _regions(), "a run has left memory behind"
