"""What a request may do to its child process, and to nothing else; and how a pool uses children."""

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
    ChildPool,
    ChildStalled,
    ChildUnavailable,
    HandlerFailed,
    LimitExceeded,
    LoadFailed,
    Sandbox,
)
from halfmoon_sandbox import child_pool as pool_module
from halfmoon_sandbox.child import wait_readable
from halfmoon_sandbox.frames import MAX_FRAME_BYTES, encode_frame
from halfmoon_sandbox.sandbox import MIB
from tests.sandbox.killed_children import kill_next_children

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
    with pytest.raises(HandlerFailed, match="as told"):
        child.call(b"fail", cpu_s=1)
    assert child.call(b"a", cpu_s=1) == b"re: a"


@pytest.mark.parametrize(
    ("request_", "limit", "proven"),
    [(b"spin", "time", True), (b"grow", "memory", True), (b"crash", "crash", False)],
)
def test_a_request_over_a_limit_ends_its_child_alone(
    sandbox: Sandbox, request_: bytes, limit: str, proven: bool
) -> None:
    """A crash alone does not prove that its request caused it."""
    with sandbox.fork() as victim, sandbox.fork() as other:
        with pytest.raises(LimitExceeded) as caught:
            victim.call(request_, cpu_s=0.3 if limit == "time" else 30)
        assert (caught.value.limit, caught.value.proven) == (limit, proven)
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


@pytest.fixture
def pool() -> Iterator[ChildPool]:
    made = ChildPool(Sandbox("halfmoon_testing.sandbox_handler:make_handler"))
    yield made
    made.close()


async def pid_of(pool: ChildPool, *, reuse: bool = True) -> int:
    """Which process answers."""
    return int(await pool.call(b"pid", cpu_s=1, reuse=reuse))


async def test_a_child_is_used_again_but_not_for_calls_at_once_nor_after_a_cancelled_one(
    pool: ChildPool,
) -> None:
    first = await pid_of(pool)
    assert await pid_of(pool) == first
    call = asyncio.create_task(pool.call(b"spin", cpu_s=600))
    while pool.idle:
        await asyncio.sleep(0)
    second = await pid_of(pool)
    assert second != first
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert [child.pid for child, _ in pool.idle] == [second]


async def test_a_child_that_failed_or_is_not_to_be_reused_ends(pool: ChildPool) -> None:
    first = await pid_of(pool, reuse=False)
    assert not pool.idle
    assert await pid_of(pool) != first
    with pytest.raises(HandlerFailed):
        await pool.call(b"fail", cpu_s=1)
    assert not pool.idle


async def test_a_child_is_replaced_in_time(
    pool: ChildPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_MAX_CALLS", 3)
    pids = [await pid_of(pool) for _ in range(6)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3]


async def test_a_template_that_died_costs_no_request(pool: ChildPool) -> None:
    await pid_of(pool)
    template = pool.sandbox.pid
    assert template is not None
    os.kill(template, signal.SIGKILL)
    # It has ended, and the kernel has told its child to, and the pool has not looked.
    await asyncio.to_thread(os.waitid, os.P_PID, template, os.WEXITED | os.WNOWAIT)
    assert await pool.call(b"a", cpu_s=1) == b"a"


@pytest.mark.parametrize("used", [False, True])
async def test_a_request_that_crashes_a_fresh_one_is_the_cause(pool: ChildPool, used: bool) -> None:
    if used:
        await pid_of(pool)
    with pytest.raises(LimitExceeded):
        await pool.call(b"crash", cpu_s=1)
    assert not pool.idle


async def test_a_request_whose_child_is_killed_from_outside_is_sent_again(
    pool: ChildPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pid_of(pool)  # the template has loaded
    kill_next_children(monkeypatch, 2)  # a used one, and a fresh one
    assert await pool.call(b"a", cpu_s=30) == b"a"


async def test_a_request_is_not_blamed_for_children_that_are_killed_each_time(
    pool: ChildPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pid_of(pool)  # the template has loaded
    kill_next_children(monkeypatch, 9)
    with pytest.raises(ChildLost, match="from outside"):
        await pool.call(b"spin", cpu_s=30)


async def test_one_crash_may_have_come_from_outside(pool: ChildPool, tmp_path: Path) -> None:
    marker = tmp_path / "crashed"
    answer = await pool.call(b"crash_once " + bytes(marker), cpu_s=30)
    assert answer.startswith(b"crash_once")


async def test_a_request_over_its_time_is_not_tried_again(pool: ChildPool) -> None:
    while len(pool.idle) < 2:  # two children to try it on
        await asyncio.gather(pid_of(pool), pid_of(pool))
    with pytest.raises(LimitExceeded):
        await pool.call(b"spin", cpu_s=0.1)
    assert len(pool.idle) == 1


async def test_a_closed_pool_has_no_child(pool: ChildPool) -> None:
    await pid_of(pool)
    pool.close()
    with pytest.raises(ChildUnavailable):
        await pool.call(b"a", cpu_s=1)
