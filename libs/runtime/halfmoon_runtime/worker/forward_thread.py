"""Run a worker's forward passes one after another, in a thread of their own.

A hand-over is one queue there and one wake-up of the event loop back. `ThreadPoolExecutor` with
`run_in_executor` takes over twice the processor time: two futures, their callbacks and three locks.
For a small model that is a good part of a step.
"""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ForwardThread:
    """Runs calls in order, for one event loop; a context manager, which waits for the last call."""

    def __init__(self) -> None:
        #: Calls to run, each of which delivers its own outcome; None ends the thread.
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_calls, name="forward", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._calls.put(None)
        self._thread.join()

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Queue a call; await the future for its result, or its error.

        A cancelled future's call is not begun; one that has begun runs to its end.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            if outcome.cancelled():
                return
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                loop.call_soon_threadsafe(_set_error, outcome, error)
            else:
                loop.call_soon_threadsafe(_set_result, outcome, result)

        self._calls.put(call)
        return outcome

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # it holds the arguments, such as a batch


def _set_result(outcome: asyncio.Future[T], result: T) -> None:
    if not outcome.cancelled():
        outcome.set_result(result)


def _set_error(outcome: asyncio.Future[T], error: BaseException) -> None:
    if outcome.cancelled():
        return
    if isinstance(error, StopIteration):  # a future can't raise it
        error = RuntimeError(f"the call raised {error!r}")
    outcome.set_exception(error)
