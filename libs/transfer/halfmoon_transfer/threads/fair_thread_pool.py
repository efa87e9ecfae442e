"""Run jobs in threads that peers share fairly.

Jobs are submitted per peer. At most `lanes` jobs of one peer run at a time, and peers take turns.
So a peer that hangs delays no other peer while there are more threads than lanes.
"""

import threading
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]


class FairThreadPool:
    """An elastic pool of threads with a queue per peer."""

    def __init__(self, name: str, *, threads: int, lanes: int, linger_s: float = 10.0) -> None:
        self._name = name
        self._max_threads = threads
        self._lanes = lanes
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        #: Jobs that wait, by peer; no peer has an empty queue.
        self._queues: dict[str, deque[Job]] = {}
        #: Jobs that run, by peer; no peer has 0.
        self._running: dict[str, int] = {}
        #: Peers that have a job waiting and a lane free, each once.
        self._ready: deque[str] = deque()
        self._threads: set[threading.Thread] = set()
        self._n_idle = 0
        self._n_made = 0
        self._closed = False

    @property
    def n_threads(self) -> int:
        """Threads alive now."""
        return len(self._threads)

    @property
    def n_idle(self) -> int:
        """Threads that wait for work now."""
        return self._n_idle

    def submit(self, peer: str, job: Job) -> None:
        """Run `job` soon, in a thread; after `close`, drop it. Jobs don't raise."""
        with self._lock:
            if self._closed:
                return
            self._queues.setdefault(peer, deque()).append(job)
            self._make_ready(peer)
            self._wake_thread()

    def try_run_inline(self, peer: str, job: Job) -> bool:
        """Run `job` in the calling thread if a lane of the peer is free; return whether it ran.

        It takes a lane like any other job, and never overtakes jobs that wait.
        """
        with self._lock:
            n_running = self._running.get(peer, 0)
            if self._closed or peer in self._queues or n_running >= self._lanes:
                return False
            self._running[peer] = n_running + 1
        try:
            job()
        finally:
            with self._lock:
                self._free_lane(peer)
                self._wake_thread()
        return True

    def close(self) -> None:
        """Wait for the jobs that run and end all threads; jobs that wait are dropped."""
        with self._lock:
            self._closed = True
            self._queues.clear()
            self._ready.clear()
            threads = set(self._threads)
            self._work.notify_all()
        for thread in threads - {threading.current_thread()}:
            thread.join()

    def _free_lane(self, peer: str) -> None:
        """Free a lane of the peer."""
        self._running[peer] -= 1
        if self._running[peer] == 0:
            del self._running[peer]
        self._make_ready(peer)

    def _make_ready(self, peer: str) -> None:
        if (
            peer in self._queues
            and peer not in self._ready
            and self._running.get(peer, 0) < self._lanes
        ):
            self._ready.append(peer)

    def _wake_thread(self) -> None:
        """Wake or start one thread if a peer is ready; a thread that takes a job does the same.

        An idle thread may have been woken already; then it wakes another one in turn.
        """
        if not self._ready:
            return
        if self._n_idle:
            self._work.notify()
        elif len(self._threads) < self._max_threads:
            thread = threading.Thread(
                target=self._run, name=f"{self._name}-{self._n_made}", daemon=True
            )
            self._n_made += 1
            self._threads.add(thread)
            thread.start()

    def _run(self) -> None:
        with self._lock:
            while self._wait_for_work():
                peer = self._ready.popleft()
                queue = self._queues[peer]
                job = queue.popleft()
                if not queue:
                    del self._queues[peer]
                self._running[peer] = self._running.get(peer, 0) + 1
                self._make_ready(peer)
                self._wake_thread()
                self._lock.release()
                try:
                    job()
                finally:
                    del job
                    self._lock.acquire()
                    self._free_lane(peer)
            self._threads.discard(threading.current_thread())

    def _wait_for_work(self) -> bool:
        """Wait until a peer is ready; False when this thread should end."""
        while not self._ready and not self._closed:
            self._n_idle += 1
            in_time = self._work.wait(self._linger_s)
            self._n_idle -= 1
            if not in_time and not self._ready:
                return False
        return not self._closed

    def check(self) -> None:
        """Assert what must hold between calls."""
        with self._lock:
            assert all(self._queues.values()), "an empty queue is kept"
            assert len(set(self._ready)) == len(self._ready)
            assert set(self._ready) <= set(self._queues)
            assert all(0 < count <= self._lanes for count in self._running.values())
            assert len(self._threads) <= self._max_threads
            for peer in self._queues:
                if self._running.get(peer, 0) < self._lanes:
                    assert peer in self._ready, f"{peer} has work and a lane, and is forgotten"
