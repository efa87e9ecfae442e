"""What is bounded between a kvstore's tiers, and counts of what happened there."""

import msgspec


class TierLimits(msgspec.Struct, frozen=True):
    """What is bounded between the tiers."""

    #: Blocks being written to the disk at once.
    max_writing: int = 8
    #: Blocks being read from it at once.
    max_promoting: int = 8
    #: Blocks that wait to be read.
    max_queued: int = 1024
    #: Seconds that a lease waits for promotions; then it is on what has come.
    promotion_wait_s: float = 1.0
    #: Blocks read ahead, past the last one that was asked for.
    read_ahead: int = 4
    #: Failed writes in a row after which the disk is left alone, and for how many seconds.
    max_failures: int = 3
    pause_s: float = 30.0


class TierCounts:
    """What happened since the start, in blocks."""

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
