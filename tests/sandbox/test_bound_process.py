"""Processes that end with the one that started them, however that one ends."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from halfmoon_sandbox.bound_process import start_bound
from halfmoon_sandbox.parent_death import end_with

#: Prints its process id, and stands still.
STANDS = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"


def owner(program: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def gone(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE or process.wait(60) is None
    except psutil.NoSuchProcess:
        return True


def first_pid(process: "subprocess.Popen[str]") -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


STARTS = (
    "import sys, threading\n"
    "from halfmoon_sandbox.bound_process import start_bound\n"
    f"start = lambda: start_bound([sys.executable, '-c', {STANDS!r}])\n"
)


@pytest.mark.parametrize("session", [False, True])
def test_a_process_ends_when_its_parent_is_killed(session: bool) -> None:
    program = STARTS.replace("])", f"], start_new_session={session})")
    with owner(f"{program}start().wait()") as parent:
        pid = first_pid(parent)
        os.kill(pid, signal.SIGSTOP)  # it can't look for its parent by itself
        parent.kill()
        assert gone(pid)


def test_a_process_outlives_the_thread_that_started_it() -> None:
    command = [sys.executable, "-c", STANDS]
    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(start_bound, command, stdout=subprocess.PIPE, text=True)
    with starting.result() as process:
        assert first_pid(process) == process.pid
        assert process.poll() is None
        process.kill()


def test_a_process_whose_parent_ended_before_it_could_ask_ends_itself() -> None:
    child = os.fork()
    if child == 0:
        end_with(1)  # not its parent
        os._exit(77)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_fork_of_this_process_starts_processes_too() -> None:
    start_bound(["true"]).wait()
    child = os.fork()
    if child == 0:
        os._exit(start_bound(["sh", "-c", "exit 7"]).wait())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_what_is_no_program_is_refused_as_popen_does(tmp_path: Path) -> None:
    for program in ("no-such-program", "/no/such/program"):
        with pytest.raises(FileNotFoundError) as found:
            start_bound([program])
        assert found.value.filename == program
    (tmp_path / "file").write_text("text")
    with pytest.raises(PermissionError):
        start_bound([tmp_path / "file"])
