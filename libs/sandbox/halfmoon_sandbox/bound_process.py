"""Start processes that end with the process that started them, even if it is killed.

To the kernel, the parent is the thread that forked. So all such processes are forked by one thread
that lives as long as this process:

    starter thread ── fork ──▶ python parent_death.py PID COMMAND… ── exec ──▶ COMMAND…

Children of the command take care of themselves: those of a `Sandbox` end with their owner's socket.
"""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from halfmoon_sandbox import parent_death

Fork = Callable[
    [Sequence[str | os.PathLike[str]], Mapping[str, Any]], "subprocess.Popen[Any] | None"
]
#: Forks a process for a command, or returns None; set by tests, which start thousands.
fork: Fork | None = None


def start_bound(
    command: Sequence[str | os.PathLike[str]], **options: Any
) -> "subprocess.Popen[Any]":
    """Start a command as `subprocess.Popen` does; it is killed when this process ends.

    Args:
        command: a program and its arguments.
        options: of `subprocess.Popen`, but for those that replace the command.

    Raises:
        OSError: there is no such program, or the system has no more processes.
    """
    _check_program(os.fspath(command[0]), (options.get("env") or os.environ).get("PATH"))
    if fork is not None and (forked := fork(command, options)) is not None:
        return forked
    wrapped = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), *command]
    return _starter().submit(lambda: subprocess.Popen(wrapped, **options)).result()


def _check_program(program: str, path: str | None) -> None:
    """Raise the error that `subprocess.Popen` would, which knows of the wrapper only."""
    if os.sep not in program:
        number = 0 if shutil.which(program, path=path) else errno.ENOENT
    elif not Path(program).is_absolute():
        return  # relative to a folder that the options may name
    elif Path(program).is_file():
        number = 0 if os.access(program, os.X_OK) else errno.EACCES
    else:
        number = errno.ENOENT
    if number:
        raise OSError(number, os.strerror(number), program)


@cache
def _starter() -> ThreadPoolExecutor:
    """Return the thread that forks; it ends with this process."""
    return ThreadPoolExecutor(1, thread_name_prefix="process starter")


os.register_at_fork(after_in_child=_starter.cache_clear)  # a fork has no such thread
