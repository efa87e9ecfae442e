"""End a worker's process when a forward pass hangs, so that a restart takes its place.

A pass that never ends can't be interrupted: it is a call into native code in a thread. The rest
of the process would go on answering heartbeats and renewing its lease, and its requests would
never get a token. Conductors notice the death of a process: they place its requests again. A
request that hangs a second worker is not tried on a third.

A thread checks the running pass. A call that holds Python's lock stops that thread too. So the
thread also keeps resetting a timer of `faulthandler`, whose own thread needs no lock.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import ParamSpec, TypeVar

import structlog

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger()

#: Exit status of a process whose forward pass hangs: EX_SOFTWARE of sysexits.h.
HUNG_STATUS = 70
#: Longest time between two checks, in seconds.
_PERIOD_S = 1.0


def end_process(seconds: float, limit_s: float) -> None:
    """Log the stacks of all threads, and exit without waiting for any of them."""
    log.critical(
        "forward_hangs",
        seconds=round(seconds, 1),
        limit_s=limit_s,
        advice="the process ends, to be started again; forward_limit_s is the limit",
    )
    logging.shutdown()
    sys.stdout.flush()
    faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    os._exit(HUNG_STATUS)


class ForwardWatchdog:
    """Detect forward passes of one thread that take longer than a limit."""

    def __init__(
        self,
        limit_s: float = inf,
        *,
        on_hang: Callable[[float, float], None] = end_process,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the limit; `run_in_background` starts the checks.

        Args:
            limit_s: longest pass, in seconds; infinite: no limit.
            on_hang: called with the pass's seconds and the limit, from the watching thread.
            now: returns seconds that only grow.
        """
        self._limit_s = limit_s
        self._on_hang = on_hang
        self._now = now
        #: Start of the running pass; None between passes.
        self._since: float | None = None

    def run(self, forward: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a pass in the calling thread; return or raise what it does."""
        self._since = self._now()
        try:
            return forward(*args, **kwargs)
        finally:
            self._since = None

    def check(self) -> None:
        """Report the running pass if it is over the limit."""
        since = self._since
        if since is not None and (seconds := self._now() - since) > self._limit_s:
            self._on_hang(seconds, self._limit_s)

    @contextmanager
    def run_in_background(self) -> Iterator[None]:
        """Check the running pass for the length of a block, in a thread of its own.

        A process may run one watchdog at a time: it uses the only timer of `faulthandler`.
        """
        period_s = min(_PERIOD_S, self._limit_s / 4)
        over = threading.Event()

        def watch() -> None:
            while not over.wait(period_s):
                # This timer expires only if this thread can't run. It is twice the limit, since
                # several long calls that hold the lock may follow each other in one pass.
                faulthandler.dump_traceback_later(2 * self._limit_s, exit=True)
                self.check()

        if self._limit_s == inf:
            yield
            return
        thread = threading.Thread(target=watch, name="forward watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()
