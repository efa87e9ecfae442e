"""When the garbage collector looks, once a service has started."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from halfmoon_runtime.gc_tuning import YOUNG_OBJECTS, tune_gc


@pytest.fixture
def looks() -> Iterator[list[int]]:
    """Generations looked at since the collector was told."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    before = gc.get_threshold()
    tune_gc()
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    # What is out of sight stays there: each collection of later tests would look at all of it.
    gc.set_threshold(*before)


def test_requests_on_their_way_are_not_looked_at_nor_what_was_there(looks: list[int]) -> None:
    assert gc.get_freeze_count() > 1000
    kept: list[list[int]] = [[] for _ in range(YOUNG_OBJECTS // 2)]
    assert not looks
    kept += [[] for _ in range(YOUNG_OBJECTS)]
    assert looks
