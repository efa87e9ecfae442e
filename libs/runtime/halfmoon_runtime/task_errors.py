"""Name the errors of tasks in a group: `asyncio.TaskGroup` raises a group of exceptions for them.

A caller that handles `TransferError`, or logs an error's text, sees neither in a group. Its text
is "unhandled errors in a TaskGroup (1 sub-exception)".
"""

from collections.abc import Iterator
from contextlib import contextmanager


def leaf_errors(failure: BaseException) -> list[BaseException]:
    """Return the exceptions in a group and its subgroups, or the exception itself."""
    if isinstance(failure, BaseExceptionGroup):
        return [leaf for one in failure.exceptions for leaf in leaf_errors(one)]
    return [failure]


@contextmanager
def raising_task_errors(*known: type[BaseException]) -> Iterator[None]:
    """Raise one task's error in place of the group of exceptions that the block raises.

    The group is its cause, so a traceback has the errors of all tasks.

    Args:
        known: errors that the caller handles: the first one of these kinds is raised. Without
            one, it is the first error of all.
    """
    try:
        yield
    except BaseExceptionGroup as failures:
        leaves = leaf_errors(failures)
        raise next((each for each in leaves if isinstance(each, known)), leaves[0]) from failures
