"""Make the threads of one engine, and tell its time.

A simulation passes threads and a clock of its own, and then runs an engine in one thread.
"""

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from halfmoon_transfer.metadata.segment_lease import Lease
from halfmoon_transfer.threads.deadline_watcher import DeadlineWatcher, HasDeadline
from halfmoon_transfer.threads.fair_thread_pool import FairThreadPool, Job
from halfmoon_transfer.threads.stop_signal import StopSignal

#: Seconds between two looks whether writes are held still.
_HELD_POLL_S = 0.01
Item = TypeVar("Item", bound=HasDeadline)
WatchedItem = TypeVar("WatchedItem", bound=HasDeadline, contravariant=True)


class JobPool(Protocol):
    """Run jobs, each in the turn of its peer; see `FairThreadPool`."""

    def submit(self, peer: str, job: Job) -> None:
        """Run a job soon; after `close`, drop it."""
        ...

    def try_run_inline(self, peer: str, job: Job) -> bool:
        """Run a job in the calling thread if a lane is free; return whether it ran."""
        ...

    def close(self) -> None:
        """Wait for the jobs that run; jobs that wait are dropped."""
        ...

    def check(self) -> None:
        """Assert what must hold between calls."""
        ...


class Watcher(Protocol[WatchedItem]):
    """End overdue items; see `DeadlineWatcher`."""

    def watch(self, item: WatchedItem) -> None:
        """Watch an item from now on."""
        ...

    def forget(self, item: WatchedItem) -> None:
        """Stop watching an item."""
        ...

    def close(self) -> None:
        """Watch nothing any more."""
        ...


class Renewal(Protocol):
    """Renew a record at intervals; see `Lease`."""

    def close(self) -> None:
        """Stop renewing, and remove the record."""
        ...


class EngineThreads:
    """Real threads, and the machine's monotonic clock."""

    def now(self) -> float:
        """Return seconds that only grow."""
        return time.monotonic()

    def wait_while_held(self, stop: StopSignal) -> bool:
        """Wait in a thread of the pool until a transfer may move bytes; return whether it may."""
        while stop.is_held and not stop.stopped and stop.remaining_s() > 0.0:
            time.sleep(_HELD_POLL_S)
        return not stop.is_held

    def open_pool(self, name: str, *, threads: int, lanes: int) -> JobPool:
        """Open a pool that carries the batches of transfers."""
        return FairThreadPool(name, threads=threads, lanes=lanes)

    def watch_deadlines(self, name: str, on_overdue: Callable[[Item], None]) -> Watcher[Item]:
        """Watch the deadlines of transfers."""
        return DeadlineWatcher(name, on_overdue)

    def renew(
        self,
        name: str,
        publish: Callable[[], None],
        withdraw: Callable[[], None],
        ttl_s: float,
    ) -> Renewal:
        """Renew the segment's record three times per `ttl_s`."""
        return Lease(name, publish, withdraw, ttl_s)
