"""Have the kernel kill this process when its parent ends (PR_SET_PDEATHSIG in prctl(2)).

Run as a program, ``python parent_death.py PARENT COMMAND…`` asks for that and becomes the command.
It runs before each service, so it imports almost nothing.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
#: Exit status of a process whose parent ended before it could ask.
_ORPHANED = 1
#: Exit status for a command that can't be run, as shells have it.
_CAN_NOT_RUN = 126

_prctl = ctypes.CDLL(None).prctl


def end_with(parent: int) -> None:
    """Have this process killed when the thread that forked it ends.

    Args:
        parent: process id of the parent; if it has ended already, this process exits.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(_ORPHANED)


def _become(parent: int, command: list[str]) -> None:
    end_with(parent)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]} can't be run: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(_CAN_NOT_RUN)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
