"""Pass the ends of loads from the pool's thread to vLLM's.

begin ──▶ under way ──finish──▶ over ──take──▶ vLLM
"""

import threading
from collections.abc import Iterable


class LoadResults:
    """Loads under way, and those that are over. All methods are safe from any thread."""

    def __init__(self) -> None:
        #: Notified when a load is over.
        self._changed = threading.Condition()
        self._n_under_way = 0
        self._over: set[str] = set()
        self._failed: set[int] = set()

    def begin(self) -> None:
        """Count a load that begins."""
        with self._changed:
            self._n_under_way += 1

    def finish(self, request_id: str, failed_blocks: Iterable[int]) -> None:
        """End a load, of which these blocks of vLLM's did not come."""
        with self._changed:
            self._n_under_way -= 1
            self._over.add(request_id)
            self._failed.update(failed_blocks)
            self._changed.notify()

    def take(self, wait_s: float = 0.0) -> tuple[set[str], set[int]]:
        """Take the requests whose load is over, and the blocks that did not come.

        Args:
            wait_s: seconds to wait for the first of them, if loads are under way.
        """
        with self._changed:
            if wait_s and self._n_under_way:
                self._changed.wait_for(lambda: self._over, wait_s)
            over, failed = self._over, self._failed
            self._over, self._failed = set(), set()
        return over, failed
