"""Run what services do in threads on the virtual loop, in the process that asks for it.

A forward pass and a call of `asyncio.to_thread` run in a greenlet: where a thread would block, it
goes back to the loop and goes on when its wait is over. All other calls in threads do not wait for
anything, so each is one callback at a drawn moment.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, Self, TypeVar

from greenlet import GreenletExit, getcurrent

from halfmoon_metadata.store_interface import MetadataError
from halfmoon_runtime.worker.forward_thread import ForwardThread
from halfmoon_testing.sim_cluster.virtual_loop import VirtualLoop, VirtualProcess
from halfmoon_transfer.interface import Transfer, TransferError
from halfmoon_transfer.threads.deadline_watcher import HasDeadline
from halfmoon_transfer.threads.fair_thread_pool import Job
from halfmoon_transfer.threads.stop_signal import StopSignal
from halfmoon_transfer.transfers.engine_threads import EngineThreads, JobPool, Watcher

P = ParamSpec("P")
T = TypeVar("T")


class VirtualForwardThread(ForwardThread):
    """Runs the forward passes of one worker one after another."""

    def __init__(self, loop: VirtualLoop, process: VirtualProcess) -> None:
        """Run nothing yet."""
        self._loop = loop
        self._process = process
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_busy = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._waiting.clear()

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """See `ForwardThread.run`."""
        outcome: asyncio.Future[T] = self._loop.create_future()

        def call() -> None:
            if not outcome.cancelled():
                try:
                    result = function(*args, **kwargs)
                except GreenletExit:
                    raise
                except Exception as error:
                    self._loop.call_later(self._loop.thread_s(), _fail, outcome, error)
                else:
                    self._loop.call_later(self._loop.thread_s(), _succeed, outcome, result)
            self._is_busy = False
            self._begin_next()

        self._waiting.append(call)
        if not self._is_busy:
            self._begin_next()
        return outcome

    def _begin_next(self) -> None:
        if self._waiting:
            self._is_busy = True
            call = self._waiting.popleft()
            self._loop.call_later(self._loop.thread_s(), self._process.run_in_thread, call)


def sleep_in_thread(seconds: float) -> None:
    """Let time pass in a forward pass, or in a call of `asyncio.to_thread`."""
    thread = getcurrent()
    assert thread.parent is not None, "only a thread may wait"
    asyncio.get_running_loop().call_later(seconds, thread.switch)
    thread.parent.switch()


def wait_in_thread(transfer: Transfer) -> object:
    """Wait for a transfer in a forward pass; raise its error."""
    thread = getcurrent()
    if not transfer.done():
        loop = asyncio.get_running_loop()

        def wake(_: Transfer) -> None:
            loop.call_soon_threadsafe(thread.switch)

        transfer.add_done_callback(wake)
        assert thread.parent is not None, "this is no forward pass"
        while not transfer.done():
            thread.parent.switch()
    return transfer.result(0)


class VirtualExecutor(Executor):
    """Runs calls one after another, in order."""

    def __init__(self, loop: VirtualLoop) -> None:
        """Run nothing yet."""
        self._loop = loop
        self._last_s = 0.0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run a call after those before it."""
        future: Future[Any] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except Exception as error:
                    future.set_exception(error)

        self._last_s = max(self._last_s, self._loop.time() + self._loop.thread_s())
        self._loop.call_at(self._last_s, call)
        return future


class VirtualEngineThreads(EngineThreads):
    """The threads of one transfer engine."""

    def __init__(self, loop: VirtualLoop, carry_s: Callable[[], float]) -> None:
        """Run nothing yet.

        Args:
            loop: runs everything.
            carry_s: draws the seconds until a batch is carried.
        """
        self._loop = loop
        self._carry_s = carry_s

    def now(self) -> float:
        """Return the virtual time."""
        return self._loop.time()

    def wait_while_held(self, stop: StopSignal) -> bool:
        """Return at once: one thread can't wait. A batch that is held counts as lost."""
        return not stop.is_held

    def open_pool(self, name: str, *, threads: int, lanes: int) -> JobPool:
        """See `EngineThreads.open_pool`."""
        return _Pool(self._loop, self._carry_s)

    def watch_deadlines(self, name: str, on_overdue: Callable[[Any], None]) -> Watcher[Any]:
        """See `EngineThreads.watch_deadlines`."""
        return _Deadlines(self._loop, on_overdue)

    def renew(
        self,
        name: str,
        publish: Callable[[], None],
        withdraw: Callable[[], None],
        ttl_s: float,
    ) -> "_Renewal":
        """See `EngineThreads.renew`."""
        return _Renewal(self._loop, publish, withdraw, ttl_s / 3)


class _Pool:
    def __init__(self, loop: VirtualLoop, carry_s: Callable[[], float]) -> None:
        self._loop = loop
        self._carry_s = carry_s
        self._is_closed = False

    def submit(self, peer: str, job: Job) -> None:
        if not self._is_closed:
            self._loop.call_later(self._carry_s(), self._run, job)

    def try_run_inline(self, peer: str, job: Job) -> bool:
        return False

    def close(self) -> None:
        self._is_closed = True

    def check(self) -> None:
        pass

    def _run(self, job: Job) -> None:
        if not self._is_closed:
            job()


class _Deadlines:
    def __init__(self, loop: VirtualLoop, on_overdue: Callable[[Any], None]) -> None:
        self._loop = loop
        self._on_overdue = on_overdue
        self._timers: dict[HasDeadline, asyncio.TimerHandle] = {}

    def watch(self, item: HasDeadline) -> None:
        self._timers[item] = self._loop.call_at(
            max(item.deadline, self._loop.time()), self._end, item
        )

    def forget(self, item: HasDeadline) -> None:
        timer = self._timers.pop(item, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        for item in list(self._timers):
            self.forget(item)

    def _end(self, item: HasDeadline) -> None:
        if self._timers.pop(item, None) is not None:
            self._on_overdue(item)


class _Renewal:
    def __init__(
        self,
        loop: VirtualLoop,
        publish: Callable[[], None],
        withdraw: Callable[[], None],
        interval_s: float,
    ) -> None:
        self._loop = loop
        self._publish = publish
        self._withdraw = withdraw
        self._interval_s = interval_s
        self._timer = loop.call_later(interval_s, self._renew)

    def close(self) -> None:
        self._timer.cancel()
        self._withdraw()

    def _renew(self) -> None:
        try:
            self._publish()
        except MetadataError:
            pass
        except TransferError:
            return
        self._timer = self._loop.call_later(self._interval_s, self._renew)


def _succeed(outcome: "asyncio.Future[T]", result: T) -> None:
    if not outcome.done():
        outcome.set_result(result)


def _fail(outcome: "asyncio.Future[T]", error: Exception) -> None:
    if not outcome.done():
        outcome.set_exception(error)
