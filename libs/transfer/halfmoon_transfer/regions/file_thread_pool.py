"""Run the file accesses of one request side by side."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from halfmoon_transfer.regions.file_region import FileShrunk

#: Accesses that the system works on at once: the queue depth of the devices.
_DEPTH = 8


class FileThreadPool:
    """A few threads, started at the first request that touches two files."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def run(self, jobs: Mapping[int, Callable[[], None]]) -> dict[int, Exception]:
        """Run all jobs and wait; return the errors of those that failed."""
        first = next(iter(jobs), None)
        with self._lock:
            pool = None if self._closed or len(jobs) < 2 else self._started()
            futures = (
                {}
                if pool is None
                else {index: pool.submit(job) for index, job in jobs.items() if index != first}
            )
        failed: dict[int, Exception] = {}
        for index, job in jobs.items():
            try:
                if index in futures:
                    futures[index].result()
                else:
                    job()
            except (FileShrunk, OSError) as error:
                failed[index] = error
        return failed

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_DEPTH, thread_name_prefix=self._label)
        return self._pool

    def close(self) -> None:
        """End the threads; later jobs run in the thread of their caller."""
        with self._lock:
            self._closed = True
            pool = self._pool
        if pool is not None:
            pool.shutdown()
