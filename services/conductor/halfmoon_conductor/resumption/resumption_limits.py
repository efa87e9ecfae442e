"""Bound the streams that are kept, and choose which to drop; pure decisions."""

from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol, TypeVar

import msgspec


class ResumptionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the streams that a conductor keeps."""

    #: Seconds that a stream is kept and generated without a reader; 0: none is kept.
    window_s: float = 0.0
    max_streams: int = 1024
    #: Bytes of the events of all kept streams.
    max_bytes: int = 64 * 1024 * 1024


class StreamPhase(IntEnum):
    """Say what a kept stream is still for; the lowest are dropped first."""

    #: All events exist, and no client reads them.
    ENDED = 0
    #: It is generated, and no client reads it.
    DETACHED = 1
    #: A client reads it, or is about to.
    ATTACHED = 2


class Droppable(Protocol):
    """A kept stream, as the choice sees it."""

    @property
    def tenant(self) -> str:
        """Return the name of its tenant; empty without tenants."""
        ...

    @property
    def phase(self) -> StreamPhase:
        """Return what it is still for."""
        ...

    @property
    def since_s(self) -> float:
        """Return the time of its last change between attached and detached."""
        ...


S = TypeVar("S", bound=Droppable)


def choose_victim(streams: Sequence[S], size: Callable[[S], int]) -> S:
    """Choose the stream to drop: of the tenant that has most, ended ones first, then the oldest.

    Args:
        streams: at least one.
        size: what counts: one for each stream, or its bytes.
    """
    held: Counter[str] = Counter()
    for each in streams:
        held[each.tenant] += size(each)
    largest = max(held, key=lambda tenant: held[tenant])
    own = (each for each in streams if each.tenant == largest and size(each))
    return min(own, key=lambda each: (each.phase, each.since_s), default=streams[0])
