"""The errors of tasks in a group, as those who handle them get to see them."""

import asyncio

import pytest

from halfmoon_runtime.task_errors import leaf_errors, raising_task_errors


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
