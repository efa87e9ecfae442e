"""Bound and count the moves between a kvstore's tiers."""

import msgspec


class TierLimits(msgspec.Struct, frozen=True):
    """Limits of the moves between the tiers."""

    #: Most blocks being written to the disk at once.
    max_writing: int = 8
    #: Most blocks being read from the disk at once.
    max_promoting: int = 8
    #: Most blocks that wait to be read from the disk.
    max_queued: int = 1024
    #: Seconds that a lease waits for promotions; then it is granted on the blocks in memory.
    promotion_wait_s: float = 1.0
    #: Blocks read ahead, past the last requested one.
    read_ahead: int = 4
    #: Failed writes in a row after which the disk is paused, and seconds of the pause.
    max_failures: int = 3
    pause_s: float = 30.0


class TierCounts:
    """Counts of blocks since the start."""

    def __init__(self) -> None:
        self.hits_memory = 0
        self.hits_disk = 0
        self.misses = 0
        self.evicted = 0
        self.written = 0
        self.write_failures = 0
        self.promoted = 0
        self.corrupt = 0
        self.dropped = 0
