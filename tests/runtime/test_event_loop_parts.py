"""What tasks of one event loop share: locks, a pace, the errors of a group, and its lag."""

import asyncio
import gc
import time
from math import inf

import pytest

from halfmoon_runtime.keyed_locks import KeyedLocks
from halfmoon_runtime.observability.loop_lag import LoopLagMonitor
from halfmoon_runtime.task_errors import leaf_errors, raising_task_errors
from halfmoon_runtime.worker.housekeeping import HousekeepingPace

# -- locks ----------------------------------------------------------------------------------------


async def test_a_key_is_locked_for_one_at_a_time_and_other_keys_are_free() -> None:
    locks: KeyedLocks[str] = KeyedLocks()
    order: list[str] = []
    inside, gate = asyncio.Event(), asyncio.Event()

    async def use(key: str, name: str) -> None:
        async with locks.lock(key):
            order.append(f"{name} in")
            if name == "first":
                inside.set()
                await gate.wait()
            order.append(f"{name} out")

    first = asyncio.create_task(use("a", "first"))
    await inside.wait()
    second = asyncio.create_task(use("a", "second"))
    await use("b", "other")
    assert order == ["first in", "other in", "other out"]
    gate.set()
    await asyncio.gather(first, second)
    assert order[3:] == ["first out", "second in", "second out"]


async def test_a_key_that_is_not_used_any_more_takes_no_memory() -> None:
    locks: KeyedLocks[int] = KeyedLocks()
    for key in range(100):
        async with locks.lock(key):
            assert len(locks) == 1
    gc.collect()
    assert len(locks) == 0


# -- housekeeping ---------------------------------------------------------------------------------


async def test_an_idle_worker_is_woken_by_a_request() -> None:
    pace = HousekeepingPace(idle_s=inf)
    waiting = asyncio.create_task(pace.wait(idle=True))
    await asyncio.sleep(0)
    assert not waiting.done()
    pace.wake()
    await waiting


async def test_a_request_of_an_earlier_round_wakes_nothing() -> None:
    pace = HousekeepingPace(busy_s=0.0, idle_s=inf)
    pace.wake()
    await pace.wait(idle=False)
    waiting = asyncio.create_task(pace.wait(idle=True))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    pace.wake()
    await waiting


async def test_time_alone_wakes_both_an_idle_worker_and_a_busy_one() -> None:
    await HousekeepingPace(busy_s=inf, idle_s=0.0).wait(idle=True)
    await HousekeepingPace(busy_s=0.0, idle_s=inf).wait(idle=False)


# -- errors ---------------------------------------------------------------------------------------


async def fail(error: BaseException) -> None:
    raise error


async def run(*errors: BaseException, known: tuple[type[BaseException], ...] = ()) -> None:
    """Run tasks that fail, in groups within each other."""
    with raising_task_errors(*known):
        async with asyncio.TaskGroup() as outer:
            outer.create_task(fail(errors[0]))
            async with asyncio.TaskGroup() as inner:
                for error in errors[1:]:
                    inner.create_task(fail(error))


async def test_a_tasks_error_is_raised_as_it_is_and_its_group_is_the_cause() -> None:
    error = ConnectionResetError("by peer")
    with pytest.raises(ConnectionResetError, match="by peer") as raised:
        await run(error)
    assert raised.value is error
    assert isinstance(error.__cause__, ExceptionGroup)


async def test_of_several_errors_one_that_the_caller_handles_is_raised() -> None:
    errors = ValueError("a"), ConnectionError("b"), KeyError("c")
    with pytest.raises(ConnectionError) as raised:
        await run(*errors, known=(KeyError, ConnectionError))
    group = raised.value.__cause__
    assert group is not None and set(leaf_errors(group)) == set(errors), "none is lost"


async def test_what_a_block_raises_without_a_group_stays_and_so_does_a_cancellation() -> None:
    with pytest.raises(KeyError), raising_task_errors(ValueError):
        raise KeyError
    task = asyncio.create_task(run(asyncio.CancelledError()))
    await task  # a task that cancels itself fails no group
    waiting = asyncio.create_task(_wait_in_a_group())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def _wait_in_a_group() -> None:
    with raising_task_errors():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.Event().wait())


# -- lag ------------------------------------------------------------------------------------------


async def test_a_loop_that_was_blocked_was_late_by_as_much_and_if_each_time_is_behind() -> None:
    lag = LoopLagMonitor()
    watching = asyncio.create_task(lag.watch())
    await asyncio.sleep(0)
    time.sleep(0.6)  # noqa: ASYNC251 -- what must not be done, done
    while not lag.lag_s.n:
        await asyncio.sleep(0.01)
    assert lag.lag_s.sum > 0.2
    assert lag.late_s > 0.2
    assert lag.behind_s == 0.0, "one pause is no overload"
    while lag.behind_s <= 0.05:
        await asyncio.sleep(0)
        time.sleep(0.4)  # noqa: ASYNC251 -- no wait: it blocks the loop, again and again
    watching.cancel()
