"""Run an event loop by virtual time, for several processes, in an order drawn from a seed.

A process is a context: whatever its tasks, timers and threads schedule carries it. So the loop
knows the process of each callback. A paused process keeps its callbacks until it goes on. A dead
one has none: as after SIGKILL, no `finally` runs.

Within a process callbacks keep asyncio's order, on which code may rely. Between processes the
seed decides. Time passes only while no process has anything to do.
"""

import asyncio
import contextvars
import heapq
import itertools
import random
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from greenlet import greenlet

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: Callbacks that may run at one moment. More mean that something polls without waiting.
_MAX_AT_ONCE = 200_000
#: Seconds that a call takes in a thread, at the least and at the most.
_THREAD_S = (0.00005, 0.002)


class LiveLock(Exception):
    """Time stands still: callbacks go on at one moment for ever."""


class VirtualProcess:
    """One process of a simulation."""

    def __init__(self, name: str) -> None:
        """Start a process, which has no tasks yet."""
        self.name = name
        self.is_dead = False
        self.is_paused = False
        #: Callbacks that are due, in order.
        self.ready: deque[events.Handle] = deque()
        #: Tasks that have not ended, by their number.
        self.tasks: dict[SimulatedTask, None] = {}
        #: What threads of the process hold while they stand still; kept until the run is over.
        self.threads: list[greenlet] = []
        self.context = contextvars.Context()
        self.context.run(_process.set, self)

    def __repr__(self) -> str:
        return self.name

    def run_in_thread(self, call: Callable[[], None]) -> None:
        """Run a call of this process that may stand still, as in a thread of its own."""
        thread = greenlet(call)
        thread.gr_context = contextvars.copy_context()
        self.threads.append(thread)
        thread.switch()
        self.threads = [each for each in self.threads if each]


_process: contextvars.ContextVar[VirtualProcess] = contextvars.ContextVar("process")


def current_process() -> VirtualProcess:
    """Return the process whose code is running."""
    return _process.get()


class SimulatedTask(asyncio.Task[Any]):
    """A task with a number for its hash, so that a set of tasks has the same order in each run."""

    def __init__(self, number: int, *args: Any, **kwargs: Any) -> None:
        """Start a task."""
        self._number = number
        super().__init__(*args, **kwargs)
        self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without sockets, threads or a clock of the machine."""

    def __init__(self, dice: random.Random) -> None:
        """Start at time 0.

        Args:
            dice: draws the order of processes, and the seconds of calls in threads.
        """
        super().__init__()
        self._dice = dice
        self._now = 0.0
        self._n_tasks = 0
        #: Time, serial number and callback of each timer.
        self._timers: list[tuple[float, int, events.TimerHandle]] = []
        self._serial = itertools.count()
        self.outside = VirtualProcess("outside")
        #: Processes with callbacks that are due, each once.
        self._runnable: list[VirtualProcess] = []
        #: Callbacks since time went on.
        self._n_at_once = 0
        self.n_callbacks = 0
        self.errors: list[str] = []
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._on_error)

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._now

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> events.Handle:
        """Do as `call_soon`: there are no other threads."""
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> events.TimerHandle:
        """Call at this time; callbacks of one moment keep the order of these calls."""
        handle = events.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._serial), handle))
        return handle

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run a call at a later moment, and deliver its result at another one.

        The call may stand still meanwhile, see `virtual_threads.sleep_in_thread`.
        """
        future: asyncio.Future[T] = self.create_future()
        process = _process.get(self.outside)

        def call() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:
                self.call_later(self.thread_s(), _set_exception, future, error)
            else:
                self.call_later(self.thread_s(), _set_result, future, result)

        self.call_later(self.thread_s(), process.run_in_thread, call)
        return future

    def thread_s(self) -> float:
        """Draw the seconds until a thread has run a call that does not stand still."""
        return self._dice.uniform(*_THREAD_S)

    def start(
        self, process: VirtualProcess, coro: Coroutine[Any, Any, T], name: str = ""
    ) -> asyncio.Task[T]:
        """Start a task in a process."""
        return self.create_task(coro, name=name or process.name, context=process.context.copy())

    # -- processes -----------------------------------------------------------------------------

    def kill(self, process: VirtualProcess) -> None:
        """End a process at once: nothing of it runs any more."""
        process.is_dead = True
        process.ready.clear()
        if process in self._runnable:
            self._runnable.remove(process)

    def pause(self, process: VirtualProcess) -> None:
        """Let a process stand still, as SIGSTOP does."""
        process.is_paused = True
        if process in self._runnable:
            self._runnable.remove(process)

    def resume(self, process: VirtualProcess) -> None:
        """Let a paused process go on, with everything that has become due."""
        process.is_paused = False
        if process.ready and not process.is_dead:
            self._runnable.append(process)

    # -- the loop ------------------------------------------------------------------------------

    def _call_soon(
        self, callback: Callable[..., object], args: Any, context: contextvars.Context | None
    ) -> events.Handle:
        handle = events.Handle(callback, args, self, context)
        self._enqueue(handle)
        return handle

    def _enqueue(self, handle: events.Handle) -> None:
        process = handle._context.get(_process, self.outside)  # type: ignore[attr-defined]
        if process.is_dead:
            return
        if not process.ready and not process.is_paused:
            self._runnable.append(process)
        process.ready.append(handle)

    def _run_once(self) -> None:
        if not self._runnable:
            self._advance()
            return
        index = self._dice.randrange(len(self._runnable)) if len(self._runnable) > 1 else 0
        process = self._runnable[index]
        ready = process.ready
        for _ in range(len(ready)):
            if process.is_paused or not ready:
                return  # paused or killed by itself
            handle = ready.popleft()
            if not handle._cancelled:
                self.n_callbacks += 1
                handle._run()
        self._n_at_once += 1
        if self._n_at_once > _MAX_AT_ONCE:
            raise LiveLock(f"{process} goes on for ever at {self._now:.6f} s")
        if not ready and process in self._runnable:
            self._runnable.remove(process)

    def _advance(self) -> None:
        """Go on to the next timer."""
        while self._timers:
            when_s, _, handle = heapq.heappop(self._timers)
            if handle.cancelled():
                continue
            if when_s > self._now:
                self._n_at_once = 0
                self._now = when_s
            self._enqueue(handle)
            return
        raise LiveLock(f"nothing is to come at {self._now:.6f} s, and the run is not over")

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        """Leave it where it is: it is skipped when it is due."""

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any
    ) -> SimulatedTask:
        self._n_tasks += 1
        task = SimulatedTask(self._n_tasks, coro, loop=loop, **kwargs)
        context = kwargs.get("context") or contextvars.copy_context()
        tasks = context.get(_process, self.outside).tasks
        tasks[task] = None
        task.add_done_callback(lambda done: tasks.pop(done, None), context=_NO_CONTEXT)
        return task

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.errors.append(f"{context['message']}: {error!r}")


_NO_CONTEXT = contextvars.Context()


def _set_result(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
