"""A thread of forward passes: order, outcomes, cancellation and its end."""

import asyncio
import gc
import threading
import weakref

import pytest

from halfmoon_runtime.worker.forward_thread import ForwardThread


async def test_results_and_errors_come_back() -> None:
    with ForwardThread() as forward:
        assert await forward.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await forward.run(divmod, 7, 0)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await forward.run(next, iter(()))
        assert await forward.run(int, "20", base=16) == 32


async def test_a_call_that_was_cancelled_before_its_turn_does_not_run() -> None:
    going, go_on = threading.Event(), threading.Event()
    ran: list[str] = []

    def first() -> None:
        going.set()
        go_on.wait()
        ran.append("first")

    with ForwardThread() as forward:
        begun = forward.run(first)
        waiting = forward.run(ran.append, "second")
        await asyncio.to_thread(going.wait)
        begun.cancel()
        waiting.cancel()
        go_on.set()
        await forward.run(ran.append, "third")
    assert ran == ["first", "third"]


async def test_leaving_the_block_waits_for_the_pass_under_way() -> None:
    going, ended = threading.Event(), threading.Event()

    def forward_pass(may_end: threading.Event) -> None:
        going.set()
        may_end.wait()
        ended.set()

    may_end = threading.Event()
    with ForwardThread() as forward:
        forward.run(forward_pass, may_end)
        await asyncio.to_thread(going.wait)
        assert not ended.is_set()
        asyncio.get_running_loop().run_in_executor(None, may_end.set)
    assert ended.is_set()


async def test_an_idle_thread_keeps_nothing_of_the_last_call() -> None:
    class Batch:
        pass

    batch = Batch()
    gone = weakref.ref(batch)
    with ForwardThread() as forward:
        await forward.run(id, batch)
        del batch
        await forward.run(int)  # the thread has let go of the call before
        gc.collect()
        assert gone() is None
