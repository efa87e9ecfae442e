"""A command on a machine that stands still again and again, as busy ones do.

    python tests/shaken.py [--seed 7] .venv/bin/pytest tests/runtime

The command and all that it starts run for some milliseconds and stand for some tens, in turns: a
test that races the clock loses, and a message that comes between two steps comes there sooner or
later. It takes five to ten times as long as without. What a test stops itself stays stopped.
"""

import argparse
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

#: Seconds of one turn, from and to.
RUNS_S = (0.002, 0.03)
STANDS_S = (0.02, 0.12)
#: Seconds between two looks at what has been started since.
LOOKS_S = 0.3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        usage="%(prog)s [--seed SEED] COMMAND …",
    )
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="repeats one")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, and how")
    asked = parser.parse_args()
    if not asked.command:
        parser.error("say what to run, such as .venv/bin/pytest tests/runtime")
    print(f"shaken with --seed {asked.seed}", flush=True)
    command = subprocess.Popen(asked.command)
    shake(command, random.Random(asked.seed))
    return command.wait()


def shake(command: "subprocess.Popen[bytes]", dice: random.Random) -> None:
    """Stop all of it and let it go on, until it is over."""
    tree: list[psutil.Process] = []
    looked_s = float("-inf")
    while command.poll() is None:
        time.sleep(dice.uniform(*RUNS_S))
        if time.monotonic() - looked_s > LOOKS_S:
            tree, looked_s = list(family(command.pid)), time.monotonic()
        stopped = [process for process in tree if suspend(process)]
        try:
            time.sleep(dice.uniform(*STANDS_S))
        finally:
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()


def family(pid: int) -> Iterator[psutil.Process]:
    try:
        first = psutil.Process(pid)
        yield first
        yield from first.children(recursive=True)
    except psutil.NoSuchProcess:
        return


def suspend(process: psutil.Process) -> bool:
    """Whether it was running."""
    try:
        if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            return False
        process.suspend()
    except psutil.NoSuchProcess:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
