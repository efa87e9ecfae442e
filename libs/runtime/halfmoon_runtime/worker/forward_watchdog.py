"""Ends a worker's process when a forward pass hangs, so that another start takes its place.

A pass that never ends can't be interrupted: it is a call into native code in a thread. The rest
of the process would go on answering heartbeats and renewing its lease, and no request that is
computed there would ever get a token. Its death is what conductors notice and know what to do
about: its requests are placed again, and one that hangs a second worker is not tried on a third.

A thread looks at the pass under way. A call that also keeps Python's lock stops that thread too,
so it keeps a timer of `faulthandler` from running out, whose own thread needs no lock.
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
#: Seconds between two looks, at the most.
_PERIOD_S = 1.0


def end_process(seconds: float, limit_s: float) -> None:
    """Say what all threads are doing, and exit without waiting for any of them."""
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
    """Notices a forward pass that takes longer than a limit. For one forward thread."""

    def __init__(
        self,
        limit_s: float = inf,
        *,
        on_hang: Callable[[float, float], None] = end_process,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch nothing yet: see `run_in_background`.

        Args:
            limit_s: seconds of one pass; infinite: passes take as long as they take.
            on_hang: called with the pass's seconds and the limit, from the watching thread.
            now: seconds on a clock that never goes back.
        """
        self._limit_s = limit_s
        self._on_hang = on_hang
        self._now = now
        #: When the pass under way began; None between passes.
        self._since: float | None = None

    def run(self, forward: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a pass in the calling thread; what it returns or raises."""
        self._since = self._now()
        try:
            return forward(*args, **kwargs)
        finally:
            self._since = None

    def check(self) -> None:
        """Report the pass under way if it is over the limit."""
        since = self._since
        if since is not None and (seconds := self._now() - since) > self._limit_s:
            self._on_hang(seconds, self._limit_s)

    @contextmanager
    def run_in_background(self) -> Iterator[None]:
        """Look again and again for the length of a block, in a thread of its own.

        One watch of a process at a time: it uses the only timer of `faulthandler`.
        """
        period_s = min(_PERIOD_S, self._limit_s / 4)
        over = threading.Event()

        def watch() -> None:
            while not over.wait(period_s):
                # Runs out only if this thread is kept from running: twice the limit, since
                # long calls that keep the lock may follow one another in one pass.
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
