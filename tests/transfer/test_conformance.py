"""What every backend must do, inside one process and between processes."""

import asyncio
import os
import random
import signal
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_protocol.regions import Region
from halfmoon_testing.processes.segment_process import segment_pattern
from halfmoon_transfer import (
    Cancelled,
    Lost,
    Memory,
    Piece,
    Rejected,
    TimedOut,
    TransferEngine,
    TransferError,
)
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan
from halfmoon_transfer.regions.byte_ops import checksum
from tests.nightly import by_day

World = Any
MIB = 1024 * 1024
SIZES = [1, 2, 3, 1000, 4095, 50_000, 65_537, MIB + 3, 8 * MIB][:: by_day(2, at_night=1)]
PATIENCE_S = 60.0


def fill(memory: Memory, seed: int) -> None:
    memory.view[:] = random.Random(seed).randbytes(len(memory.view))


def move(engine: TransferEngine, op: Any, *pieces: Piece, deadline_s: float = PATIENCE_S) -> Any:
    return engine.submit(op, pieces, deadline_s).result(PATIENCE_S)


# Bytes.


@pytest.mark.parametrize("op", ["write", "read"])
@pytest.mark.parametrize("n_bytes", SIZES)
def test_exactly_the_bytes_of_a_piece_are_written_or_read(
    world: World, n_bytes: int, op: str
) -> None:
    here, there = world.open("here"), world.open("there")
    local, remote = here.allocate(n_bytes + 20), there.allocate(n_bytes + 20)
    source, target = (local, remote) if op == "write" else (remote, local)
    at, start = (7, 5) if op == "write" else (5, 7)
    fill(source, 1)
    report = move(here, op, Piece(local.region, 7, remote.region, 5, n_bytes))
    assert target.view[start : start + n_bytes] == source.view[at : at + n_bytes]
    assert bytes(target.view[:start]) + bytes(target.view[start + n_bytes :]) == bytes(20)
    assert (report.n_bytes, report.path) == (n_bytes, (world.kind,))
    assert here.stats().bytes_by_path == {(world.kind, op): n_bytes}


@settings(
    max_examples=by_day(5, at_night=30),
    deadline=None,
)
@given(data=st.data())
def test_a_scatter_list_is_as_good_as_its_pieces(world: World, data: st.DataObject) -> None:
    room = 300_000
    name = f"segment-{data.draw(st.uuids())}"
    with world.open(f"{name}-here") as here, world.open(f"{name}-there") as there:
        local = [here.allocate(room) for _ in range(2)]
        remote = [there.allocate(room) for _ in range(2)]
        for seed, memory in enumerate(local + remote):
            fill(memory, seed)
        op = data.draw(st.sampled_from(["read", "write"]))
        # Cut a whole region into runs: they don't overlap at the destination.
        cuts = data.draw(st.lists(st.integers(0, room), max_size=8).map(sorted))
        pieces, expected = [], [bytearray(memory.view) for memory in local + remote]
        for start, end in zip([0, *cuts], [*cuts, room], strict=True):
            length = end - start
            side = data.draw(st.integers(0, 1))
            other = data.draw(st.integers(0, 1))
            other_start = data.draw(st.integers(0, room - length))
            if op == "write":
                piece = Piece(local[other].region, other_start, remote[side].region, start, length)
                source = local[other].view[other_start : other_start + length]
                expected[2 + side][start:end] = source
            else:
                piece = Piece(local[side].region, start, remote[other].region, other_start, length)
                source = remote[other].view[other_start : other_start + length]
                expected[side][start:end] = source
            pieces.append(piece)
        move(here, op, *data.draw(st.permutations(pieces)))
        assert [bytes(memory.view) for memory in local + remote] == [
            bytes(each) for each in expected
        ]
        del local, remote, memory, source


def test_a_write_waits_while_writes_are_held_and_a_read_does_not(world: World) -> None:
    here, there = world.open("here"), world.open("there")
    source, target = here.allocate(5000), there.allocate(5000)
    fill(source, 3)
    piece = Piece(source.region, 0, target.region, 0, 5000)
    move(here, "read", piece)  # the ways are known from now on, and connections are idle
    fill(source, 4)
    before, may_write = bytes(target.view), threading.Event()
    here.allow_writes_while(may_write.is_set)
    move(here, "read", Piece(here.allocate(9).region, 0, target.region, 0, 9))
    held = here.submit("write", [piece])
    given_up = here.submit("write", [piece])
    late = here.submit("write", [piece], deadline_s=0.2)
    given_up.cancel()
    with pytest.raises(Cancelled):
        given_up.result(60)
    with pytest.raises(TransferError):
        late.result(60)
    with pytest.raises(TransferError):
        here.transfer("write", [piece], deadline_s=0.2)
    assert not held.done()
    assert bytes(target.view) == before
    may_write.set()
    held.result(60)
    assert target.view == source.view


# Many at once.


def test_many_threads_may_use_one_engine(world: World) -> None:
    here, there = world.open("here"), world.open("there")
    n_threads, n_each, size = 6, 20, 30_000
    total = n_threads * n_each * size
    source, target, back = here.allocate(total), there.allocate(total), here.allocate(total)
    fill(source, 5)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(n_each):
                at = (number * n_each + i) * size
                move(here, "write", Piece(source.region, at, target.region, at, size))
                move(here, "read", Piece(back.region, at, target.region, at, size))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert back.view == source.view
    assert here.stats().n_live == 0


async def test_many_transfers_may_be_awaited_at_once(world: World) -> None:
    here, there = world.open("here"), world.open("there")
    source, target = here.allocate(600_000), there.allocate(600_000)
    fill(source, 6)
    reports = await asyncio.gather(
        *(
            _awaited(here, Piece(source.region, i * 10_000, target.region, i * 10_000, 10_000))
            for i in range(60)
        )
    )
    assert sum(report.n_bytes for report in reports) == 600_000
    assert target.view == source.view


async def _awaited(engine: TransferEngine, piece: Piece) -> Any:
    return await engine.submit("write", [piece])


def test_giving_up_waiting_or_closing_the_loop_does_not_cancel_the_transfer(
    make_world: Any,
) -> None:
    world = make_world("memory")
    slow = FaultInjection("memory", FaultPlan(delay_s=0.2))
    here, there = world.open("here", backends=(slow,)), world.open("there")
    source, target = here.allocate(1000), there.allocate(1000)
    fill(source, 7)
    transfer = here.submit("write", [Piece(source.region, 0, target.region, 0, 1000)])

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(transfer, 0.01)

    asyncio.run(give_up())
    assert transfer.result(PATIENCE_S).n_bytes == 1000
    assert target.view == source.view


# What is refused.


def test_bounds_are_checked_here_with_offset_length_and_limit(world: World) -> None:
    here, there = world.open("here"), world.open("there")
    local, remote = here.allocate(1000), there.allocate(500)
    with pytest.raises(Rejected, match=r"100 bytes at remote offset 450.*500 bytes"):
        move(here, "write", Piece(local.region, 0, remote.region, 450, 100))
    with pytest.raises(Rejected, match=r"100 bytes at local offset 950.*1000 bytes"):
        move(here, "read", Piece(local.region, 950, remote.region, 0, 100))
    with pytest.raises(Rejected, match="offset -1"):
        move(here, "read", Piece(local.region, 0, remote.region, -1, 100))


@pytest.mark.parametrize("op", ["read", "write"])
def test_the_owner_checks_bounds_whatever_the_peer_believes(world: World, op: str) -> None:
    here, there = world.open("here"), world.open("there")
    local, remote = here.allocate(1000), there.allocate(500)
    fill(local, 8)
    forged = msgspec.structs.replace(remote.region, length=10**12)
    for offset in (450, 500, 10**11):
        with pytest.raises(Rejected, match=f"100 bytes at offset {offset} .*500 bytes"):
            move(here, op, Piece(local.region, 0, forged, offset, 100))
    assert bytes(remote.view) == bytes(500)
    # A good piece on either side does not hide it, and the path is in order afterwards.
    good = [Piece(local.region, at, remote.region, at, 100) for at in (0, 300)]
    with pytest.raises(Rejected):
        move(here, op, good[0], Piece(local.region, 200, forged, 450, 100), good[1])
    move(here, op, *good)


def test_a_region_that_was_taken_back_is_refused(world: World) -> None:
    here, there = world.open("here"), world.open("there")
    local, remote = here.allocate(100), there.allocate(100)
    fill(local, 9)
    piece = Piece(local.region, 0, remote.region, 0, 100)
    move(here, "read", piece)
    there.unregister(remote.region)
    fill(local, 9)
    with pytest.raises(Rejected, match="no region of this key"):
        move(here, "write", piece)
    assert bytes(remote.view) == bytes(100)
    with pytest.raises(Rejected, match="not a region"):
        there.unregister(remote.region)
    never = msgspec.structs.replace(remote.region, key=os.urandom(16))
    with pytest.raises(Rejected, match="no region of this key"):
        move(here, "read", Piece(local.region, 0, never, 0, 100))


def test_a_local_region_that_is_not_ours_is_refused(world: World) -> None:
    here, there = world.open("here"), world.open("there")
    remote, other = there.allocate(100), there.allocate(100)
    with pytest.raises(Rejected, match="register it first"):
        move(here, "write", Piece(other.region, 0, remote.region, 0, 100))
    gone = here.allocate(100)
    here.unregister(gone.region)
    with pytest.raises(Rejected, match="register it first"):
        move(here, "write", Piece(gone.region, 0, remote.region, 0, 100))


def test_read_only_memory_can_be_read_and_not_written(host_world: World) -> None:
    here, there = host_world.open("here"), host_world.open("there")
    local, text = here.allocate(5), there.register(b"fixed")
    with pytest.raises(Rejected, match="read-only"):
        move(here, "write", Piece(local.region, 0, text, 0, 5))
    move(here, "read", Piece(local.region, 0, text, 0, 5))
    assert bytes(local.view) == b"fixed"
    with pytest.raises(Rejected, match="read-only"):
        move(there, "read", Piece(text, 0, local.region, 0, 5))


def test_a_region_of_an_earlier_start_is_refused_with_both_generations(world: World) -> None:
    here = world.open("here")
    local = here.allocate(100)
    first = world.open("there", generation=6)
    old = first.allocate(100)
    move(here, "write", Piece(local.region, 0, old.region, 0, 100))
    first.close()
    second = world.open("there", generation=7)
    new = second.allocate(100)
    fill(local, 10)
    with pytest.raises(Rejected, match=r"generation 7 now.*generation 6"):
        move(here, "write", Piece(local.region, 0, old.region, 0, 100))
    assert bytes(new.view) == bytes(100)
    move(here, "write", Piece(local.region, 0, new.region, 0, 100))
    assert new.view == local.view


def test_a_segment_that_nobody_has_heard_of_or_that_was_closed_is_lost(world: World) -> None:
    here, there = world.open("here"), world.open("there")
    local, remote = here.allocate(100), there.allocate(100)
    nobody = Region("nobody", 1, bytes(16), 100)
    with pytest.raises(Lost, match="nobody is not in the metadata store"):
        move(here, "read", Piece(local.region, 0, nobody, 0, 100))
    piece = Piece(local.region, 0, remote.region, 0, 100)
    move(here, "write", piece)
    there.close()
    with pytest.raises(Lost):
        move(here, "write", piece)


# Stopping.


def stuck(world: World) -> TransferEngine:
    """An engine whose transfers don't get anywhere by themselves."""
    inner = world.kind.removeprefix("faults(").removesuffix(")")
    engine: TransferEngine = world.open(
        "stuck", backends=(FaultInjection(inner, FaultPlan(delay_s=600)),)
    )
    return engine


def test_a_cancelled_transfer_ends_once_and_says_so(world: World) -> None:
    here, there = stuck(world), world.open("there")
    local, remote = here.allocate(10 * MIB), there.allocate(10 * MIB)
    transfer = here.submit("write", [Piece(local.region, 0, remote.region, 0, 10 * MIB)])
    with pytest.raises(TimedOut, match="it goes on"):
        transfer.result(0.01)
    assert not transfer.done()
    transfer.cancel()
    for _ in range(2):
        with pytest.raises(Cancelled, match="write of 10485760 bytes"):
            transfer.result(PATIENCE_S)
        transfer.cancel()
    assert here.stats().n_live == 0


def test_a_deadline_ends_a_transfer(world: World) -> None:
    here, there = stuck(world), world.open("there")
    local, remote = here.allocate(10 * MIB), there.allocate(10 * MIB)
    piece = Piece(local.region, 0, remote.region, 0, 10 * MIB)
    with pytest.raises(TimedOut, match=r"not done after 0\.05 s"):
        move(here, "write", piece, deadline_s=0.05)
    with pytest.raises(TimedOut):
        move(here, "write", piece, deadline_s=0.0)


def test_closing_the_engine_cancels_what_is_live(world: World) -> None:
    here, there = stuck(world), world.open("there")
    local, remote = here.allocate(1000), there.allocate(1000)
    pieces = [Piece(local.region, 0, remote.region, 0, 1000)]
    transfers = [here.submit("read", pieces) for _ in range(10)]
    here.close()
    here.close()
    for transfer in transfers:
        with pytest.raises(Cancelled, match="closed"):
            transfer.result(0)
    with pytest.raises(Cancelled, match="closed"):
        here.submit("read", pieces).result(0)
    with pytest.raises(TransferError, match="closed"):
        here.allocate(10)


# Views.


def test_a_view_shows_the_bytes_without_a_copy_or_is_none(world: World) -> None:
    here, there = world.open("here"), world.open("there")
    remote, own = there.allocate(100_000), here.allocate(30)
    fill(remote, 11)
    fill(own, 12)
    mine = here.view(own.region, 10, 20)
    if world.on_device in ("both", "here"):
        assert mine is None, "device memory is not to be looked at"
    else:
        assert mine is not None and mine.readonly
        assert mine == own.view[10:30]
    view = here.view(remote.region, 1000, 50_000)
    if not world.has_views:
        assert view is None
        return
    assert view is not None
    assert view == remote.view[1000:51_000]
    assert view.readonly
    remote.view[1000] ^= 0xFF
    assert view[0] == remote.view[1000]
    with pytest.raises(Rejected, match=r"100000 bytes"):
        here.view(remote.region, 99_999, 2)
    with pytest.raises(Rejected):
        here.view(msgspec.structs.replace(remote.region, key=bytes(16)), 0, 1)


# Another process.


def test_bytes_cross_process_borders_both_ways(far_world: World) -> None:
    here = far_world.open("here")
    size = 3 * MIB + 17
    there = far_world.start("there", 1, size)
    local = here.allocate(size)
    report = move(here, "read", Piece(local.region, 0, there.region, 0, size))
    assert bytes(local.view) == segment_pattern(size)
    assert report.path == (far_world.kind.split(",")[0],)
    fill(local, 13)
    move(here, "write", Piece(local.region, 0, there.region, 0, size))
    assert there.ask("digest") == str(checksum(local.view))


def test_a_peer_that_is_killed_in_the_middle_is_lost_and_nothing_hangs(far_world: World) -> None:
    here = far_world.open("here")
    size = 4 * MIB
    there = far_world.start("there", 1, size)
    local = here.allocate(size)
    piece = Piece(local.region, 0, there.region, 0, size)
    move(here, "write", piece)
    transfers = [here.submit("write", [piece], PATIENCE_S) for _ in range(200)]
    transfers[3].result(PATIENCE_S)
    there.kill()
    ends = []
    for transfer in transfers:
        try:
            transfer.result(PATIENCE_S)
            ends.append("done")
        except Lost:
            ends.append("lost")
    assert ends[3] == "done"
    with pytest.raises(Lost, match="there"):
        move(here, "read", piece)
    here.check()


def test_a_peer_that_stands_still_costs_no_more_than_the_deadline(make_world: Any) -> None:
    world = make_world("tcp")
    here = world.open("here")
    there = world.start("there", 1, 32 * MIB)
    local = here.allocate(32 * MIB)
    piece = Piece(local.region, 0, there.region, 0, 32 * MIB)
    move(here, "write", Piece(local.region, 0, there.region, 0, 1000))
    os.kill(there.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimedOut, match="segment there at 127"):
            move(here, "write", piece, deadline_s=0.3)
        transfer = here.submit("read", [piece], PATIENCE_S)
        transfer.cancel()
        with pytest.raises(Cancelled):
            transfer.result(PATIENCE_S)
    finally:
        os.kill(there.pid, signal.SIGCONT)
    move(here, "write", piece)


def test_a_peer_that_stands_still_delays_no_other_peer(make_world: Any) -> None:
    world = make_world("tcp")
    here = world.open("here")
    still, live = world.start("still", 1, MIB), world.open("live")
    local, remote = here.allocate(MIB), live.allocate(MIB)
    os.kill(still.pid, signal.SIGSTOP)
    stuck_ones = [
        here.submit("write", [Piece(local.region, 0, still.region, 0, MIB)], PATIENCE_S)
        for _ in range(40)
    ]
    for _ in range(20):
        move(here, "write", Piece(local.region, 0, remote.region, 0, MIB))
    assert not any(transfer.done() for transfer in stuck_ones)
