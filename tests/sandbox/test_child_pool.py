"""A pool's children are used again, replaced in time, and not blamed for what others left."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon_sandbox import (
    Child,
    ChildLost,
    ChildPool,
    ChildUnavailable,
    HandlerFailed,
    LimitExceeded,
    Sandbox,
)
from halfmoon_sandbox import child_pool as pool_module


@pytest.fixture
def pool() -> Iterator[ChildPool]:
    made = ChildPool(Sandbox("halfmoon_testing.sandbox_handler:make_handler"))
    yield made
    made.close()


async def pid_of(pool: ChildPool, *, reuse: bool = True) -> int:
    """Which process answers."""
    return int(await pool.call(b"pid", cpu_s=1, reuse=reuse))


async def test_a_child_is_used_again_but_not_for_calls_at_once(pool: ChildPool) -> None:
    assert await pid_of(pool) == await pid_of(pool)
    pids = await asyncio.gather(*(pid_of(pool) for _ in range(4)))
    assert len(set(pids)) == 4


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


async def test_a_used_child_that_died_costs_no_request(pool: ChildPool) -> None:
    os.kill(await pid_of(pool), signal.SIGKILL)
    assert await pool.call(b"a", cpu_s=1) == b"a"


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


async def kill_working_children(pool: ChildPool, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Kill the next `n` children that get a request, as an operator or the kernel may."""
    begin, left = Child.begin, [*range(n)]

    def begin_and_die(child: Child, request: bytes, *, cpu_s: float) -> None:
        if left:
            left.pop()
            os.kill(child.pid, signal.SIGKILL)
        begin(child, request, cpu_s=cpu_s)

    await pid_of(pool)  # the template has loaded
    monkeypatch.setattr(Child, "begin", begin_and_die)


async def test_a_request_whose_child_is_killed_from_outside_is_sent_again(
    pool: ChildPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kill_working_children(pool, monkeypatch, 2)  # a used one, and a fresh one
    assert await pool.call(b"a", cpu_s=30) == b"a"


async def test_a_request_is_not_blamed_for_children_that_are_killed_each_time(
    pool: ChildPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kill_working_children(pool, monkeypatch, 9)
    with pytest.raises(ChildLost, match="from outside"):
        await pool.call(b"spin", cpu_s=30)


async def test_one_crash_may_have_come_from_outside(pool: ChildPool, tmp_path: Path) -> None:
    marker = tmp_path / "crashed"
    answer = await pool.call(b"crash_once " + bytes(marker), cpu_s=30)
    assert answer.startswith(b"crash_once")


async def test_a_request_over_its_time_is_not_tried_again(pool: ChildPool) -> None:
    for _ in range(2):  # two children to try it on
        await asyncio.gather(pid_of(pool), pid_of(pool))
    assert len(pool.idle) == 2
    with pytest.raises(LimitExceeded):
        await pool.call(b"spin", cpu_s=0.1)
    assert len(pool.idle) == 1


async def test_a_cancelled_call_leaves_no_child(pool: ChildPool) -> None:
    await pid_of(pool)
    call = asyncio.create_task(pool.call(b"spin", cpu_s=600))
    while pool.idle:
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not pool.idle


async def test_a_closed_pool_has_no_child(pool: ChildPool) -> None:
    await pid_of(pool)
    pool.close()
    with pytest.raises(ChildUnavailable):
        await pool.call(b"a", cpu_s=1)
