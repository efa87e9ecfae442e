"""Run coroutines in a thread of their own, beside vLLM's threads."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

log = logging.getLogger("vllm.halfmoon")


class LoopThread:
    """An event loop in a daemon thread, with one main coroutine."""

    def __init__(self, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start `main`; it runs until `close`, and its errors are logged."""
        self._main = main
        self._ready = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._ready.wait()

    def submit(self, work: Coroutine[Any, Any, None]) -> "Future[None]":
        """Start a coroutine in the loop, from any thread."""
        assert self._loop is not None, "the thread has started"
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel `main` and wait for the thread."""
        assert self._loop is not None, "the thread has started"
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(timeout_s)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        try:
            asyncio.run(self._start())
        except asyncio.CancelledError:
            pass
        except Exception:
            log.exception("a thread of HalfmoonConnector ended")
        finally:
            self._ready.set()

    async def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._ready.set()
        await self._main()
