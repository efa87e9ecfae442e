"""Child processes with limits: what a request may do to its child, and to nothing else."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from halfmoon_sandbox import (
    Child,
    ChildLost,
    ChildStalled,
    ChildUnavailable,
    HandlerFailed,
    LimitExceeded,
    LoadFailed,
    Sandbox,
)
from halfmoon_sandbox.child import wait_readable
from halfmoon_sandbox.frames import MAX_FRAME_BYTES, encode_frame
from halfmoon_sandbox.sandbox import MIB

FACTORY = "halfmoon_testing.sandbox_handler:make_handler"


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(FACTORY, b"re: ", memory_bytes=64 * MIB) as made:
        yield made


@pytest.fixture
def child(sandbox: Sandbox) -> Iterator[Child]:
    with sandbox.fork() as made:
        yield made


def test_a_child_answers_one_request_after_another(child: Child) -> None:
    assert child.call(b"a", cpu_s=1) == b"re: a"
    assert child.call(b"", cpu_s=1) == b"re: "
    large = bytes(10 * MIB)
    assert child.call(large, cpu_s=10) == b"re: " + large
    assert child.cpu_s > 0


def test_a_handlers_error_is_told_and_its_child_goes_on(child: Child) -> None:
    with pytest.raises(HandlerFailed, match="as told"):
        child.call(b"fail", cpu_s=1)
    assert child.call(b"a", cpu_s=1) == b"re: a"


@pytest.mark.parametrize(
    ("request_", "limit"), [(b"spin", "time"), (b"grow", "memory"), (b"crash", "crash")]
)
def test_a_request_over_a_limit_ends_its_child_alone(
    sandbox: Sandbox, request_: bytes, limit: str
) -> None:
    with sandbox.fork() as victim, sandbox.fork() as other:
        with pytest.raises(LimitExceeded) as caught:
            victim.call(request_, cpu_s=0.3 if limit == "time" else 30)
        assert caught.value.limit == limit
        assert not victim.alive
        with pytest.raises(ChildUnavailable):
            victim.call(b"a", cpu_s=1)
        assert other.call(b"a", cpu_s=1) == b"re: a"


def test_a_child_that_sleeps_is_ended_by_the_clock_on_the_wall_without_blame(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfmoon_sandbox.child._WALL_EXTRA_S", 0.2)
    with pytest.raises(ChildStalled):
        child.call(b"sleep", cpu_s=0.01)
    assert not child.alive


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_child_that_is_ended_from_outside_is_no_limit_that_its_request_passed(
    child: Child, number: signal.Signals
) -> None:
    child.begin(b"spin", cpu_s=600)
    os.kill(child.pid, number)
    with pytest.raises(ChildLost, match=f"signal {number:d}"):
        while child.poll() is None:
            wait_readable([child], 1.0)


@pytest.mark.parametrize(("request_", "proven"), [(b"grow", True), (b"crash", False)])
def test_a_crash_alone_does_not_prove_that_its_request_caused_it(
    child: Child, request_: bytes, proven: bool
) -> None:
    with pytest.raises(LimitExceeded) as caught:
        child.call(request_, cpu_s=30)
    assert caught.value.proven is proven


def test_an_owner_that_does_not_wait_can_look_again_later(child: Child) -> None:
    child.begin(b"a", cpu_s=1)
    assert child.busy
    while (answer := child.poll()) is None:
        pass
    assert answer == b"re: a"
    assert not child.busy


async def test_a_cancelled_call_ends_the_process(child: Child) -> None:
    pid = child.pid
    call = asyncio.create_task(child.call_async(b"spin", cpu_s=600))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not child.alive
    _wait_until_gone([pid])
    assert child.pid == 0


async def test_calls_on_a_loop_leave_it_free(sandbox: Sandbox) -> None:
    with sandbox.fork() as slow, sandbox.fork() as quick:
        spinning = asyncio.create_task(slow.call_async(b"spin", cpu_s=0.5))
        answered = 0
        while not spinning.done():
            answered += await quick.call_async(b"a" * MIB, cpu_s=1) != b""
        with pytest.raises(LimitExceeded):
            await spinning
        assert answered > 1


def test_closing_the_sandbox_ends_all_its_processes(sandbox: Sandbox) -> None:
    children = [sandbox.fork() for _ in range(3)]
    pids = [sandbox.pid, *(child.pid for child in children)]
    sandbox.close()
    _wait_until_gone(pids)
    with pytest.raises(ChildUnavailable):
        sandbox.fork()


OWNER = f"""
import time
from halfmoon_sandbox import Sandbox
sandbox = Sandbox({FACTORY!r})
child = sandbox.fork()
child.begin(b"spin", cpu_s=3600)
print(sandbox.pid, child.pid, flush=True)
time.sleep(3600)
"""


def test_an_owner_that_is_killed_leaves_no_process_behind() -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        owner.kill()
    _wait_until_gone(pids)


def test_a_child_ends_with_its_template_which_is_started_again(sandbox: Sandbox) -> None:
    with sandbox.fork() as child:
        child.begin(b"spin", cpu_s=600)
        assert sandbox.pid is not None
        os.kill(sandbox.pid, signal.SIGKILL)
        with pytest.raises(ChildUnavailable, match="with its template"):
            while child.poll() is None:
                time.sleep(0.01)
    _wait_until_gone([sandbox.pid])
    with sandbox.fork() as child:
        assert child.call(b"a", cpu_s=1) == b"re: a"


def test_a_handler_that_can_not_be_made_is_told() -> None:
    with (
        Sandbox(FACTORY, b"broken") as sandbox,
        pytest.raises(ChildUnavailable, match="this one never loads"),
    ):
        sandbox.wait_ready()


def test_a_handler_that_takes_too_long_to_make_is_given_up_once_and_for_all() -> None:
    with Sandbox(FACTORY, b"endless", load_cpu_s=0.5) as sandbox:
        for _ in range(2):
            with pytest.raises(LoadFailed, match=r"over 0\.5 s of processor time") as failed:
                sandbox.wait_ready()
            assert failed.value.limit == "time"


def test_threads_may_fork_at_once(sandbox: Sandbox) -> None:
    answers: list[bytes] = []

    def ask() -> None:
        with sandbox.fork() as child:
            answers.append(child.call(b"a", cpu_s=1))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [b"re: a"] * 16


def test_a_request_over_the_largest_frame_is_refused_before_it_is_sent(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_FRAME_BYTES == 256 * MIB
    monkeypatch.setattr("halfmoon_sandbox.frames.MAX_FRAME_BYTES", 100)
    with pytest.raises(ValueError, match="over 100"):
        child.call(bytes(101), cpu_s=1)
    monkeypatch.undo()
    assert child.call(b"a", cpu_s=1) == b"re: a"


def _wait_until_gone(pids: Sequence[int | None]) -> None:
    for pid in pids:
        while _runs(pid):
            time.sleep(0.01)


def _runs(pid: int | None) -> bool:
    try:
        # A zombie has ended; somebody else's process reaps it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_template_whose_owner_ended_with_answers_unread_ends_without_a_word() -> None:
    owned, given = socket.socketpair()
    with owned:
        owned.sendall(encode_frame(b"re: "))
        words = ["-P", "-m", "halfmoon_sandbox.template_process", str(given.fileno()), FACTORY]
        template = subprocess.Popen(
            [sys.executable, *words, str(64 * MIB), "0", "30"],
            pass_fds=[given.fileno()], stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        given.close()
        owned.recv(1, socket.MSG_PEEK)  # READY is there, and stays unread: the close is a reset
    _, said = template.communicate(timeout=60)
    assert (template.returncode, said) == (0, "")
