"""What every backend must do, inside one process and between processes."""

import asyncio
import contextlib
import os
import random
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
from tests.transfer.conftest import PATIENCE_S, Ends, FarEnds, standing_still

World = Any
MIB = 1024 * 1024
SIZES = [1, 2, 3, 1000, 4095, 50_000, 65_537, MIB + 3, 8 * MIB][:: by_day(2, at_night=1)]


def fill(memory: Memory, seed: int) -> None:
    memory.view[:] = random.Random(seed).randbytes(len(memory.view))


def move(engine: TransferEngine, op: Any, *pieces: Piece, deadline_s: float = PATIENCE_S) -> Any:
    return engine.submit(op, pieces, deadline_s).result(PATIENCE_S)


# The registry.


def test_every_backend_is_tested_here_or_says_why_not(registered: str, tested: set[str]) -> None:
    assert registered in tested


# Bytes.


@pytest.mark.parametrize("n_bytes", SIZES)
def test_exactly_these_bytes_are_written_there_and_read_here(world: World, n_bytes: int) -> None:
    ends = Ends(world, n_bytes + 20)
    local, remote = ends.local, ends.remote
    fill(local, 1)
    report = ends.move("write", Piece(local.region, 7, remote.region, 5, n_bytes))
    assert remote.view[5 : 5 + n_bytes] == local.view[7 : 7 + n_bytes]
    assert bytes(remote.view[:5]) + bytes(remote.view[5 + n_bytes :]) == bytes(20)
    assert (report.n_bytes, report.path) == (n_bytes, (world.kind,))
    assert ends.here.stats().bytes_by_path == {(world.kind, "write"): n_bytes}
    fill(remote, 2)
    local.view[:] = bytes(n_bytes + 20)
    ends.move("read", Piece(local.region, 3, remote.region, 11, n_bytes))
    assert local.view[3 : 3 + n_bytes] == remote.view[11 : 11 + n_bytes]
    assert bytes(local.view[:3]) + bytes(local.view[3 + n_bytes :]) == bytes(20)


@settings(max_examples=by_day(5, at_night=30), deadline=None)
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
    ends = Ends(world, 5000)
    here, source, target, piece = ends.here, ends.local, ends.remote, ends.piece
    fill(source, 3)
    ends.move("read")  # the ways are known from now on, and connections are idle
    fill(source, 4)
    before, may_write = bytes(target.view), threading.Event()
    here.allow_writes_while(may_write.is_set)
    ends.move("read", Piece(here.allocate(9).region, 0, target.region, 0, 9))
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


def test_no_pieces_and_empty_pieces_are_done_at_once(world: World) -> None:
    here = world.open("here")
    memory = here.allocate(10)
    nobody = Region("nobody", 1, bytes(16), 10)
    assert here.submit("write", []).done()
    transfer = here.submit("read", [Piece(memory.region, 10, nobody, 10, 0)])
    assert transfer.done()
    assert transfer.result().n_bytes == 0


def test_one_transfer_may_go_to_several_peers(world: World) -> None:
    here = world.open("here")
    source = here.allocate(300_000)
    fill(source, 3)
    targets = [world.open(f"there-{i}").allocate(100_000) for i in range(3)]
    pieces = [
        Piece(source.region, i * 100_000, target.region, 0, 100_000)
        for i, target in enumerate(targets)
    ]
    move(here, "write", *pieces)
    assert b"".join(target.view for target in targets) == source.view


def test_our_own_regions_are_reached_like_any_other(world: World) -> None:
    here = world.open("here")
    source, target = here.allocate(200_000), here.allocate(200_000)
    fill(source, 4)
    move(here, "write", Piece(source.region, 0, target.region, 0, 200_000))
    assert target.view == source.view


def test_a_region_may_be_any_buffer(host_world: World) -> None:
    world = host_world
    here, there = world.open("here"), world.open("there")
    mine, theirs = bytearray(b"x" * 1000), bytearray(1000)
    piece = Piece(here.register(mine), 0, there.register(theirs), 0, 1000)
    move(here, "write", piece)
    assert theirs == mine


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
    ends = Ends(world, 600_000)
    fill(ends.local, 6)
    local, remote = ends.local.region, ends.remote.region

    async def move(at: int) -> int:
        report = await ends.here.submit("write", [Piece(local, at, remote, at, 10_000)])
        return report.n_bytes

    moved = await asyncio.gather(*map(move, range(0, 600_000, 10_000)))
    assert sum(moved) == 600_000
    assert ends.remote.view == ends.local.view


def slowed(world: World, delay_s: float) -> dict[str, Any]:
    """Overrides of an engine each of whose slices takes so long."""
    inner = world.kind.removeprefix("faults(").removesuffix(")")
    return {"backends": (FaultInjection(inner, FaultPlan(delay_s=delay_s)),)}


def test_giving_up_waiting_cancels_no_transfer_though_the_loop_is_closed(world: World) -> None:
    ends = Ends(world, 1000, here=slowed(world, 0.2))
    fill(ends.local, 7)
    transfer = ends.here.submit("write", [ends.piece])

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(transfer, 0.01)

    async def wait() -> int:
        return (await transfer).n_bytes

    asyncio.run(give_up())
    assert asyncio.run(wait()) == 1000
    assert ends.remote.view == ends.local.view


def test_a_callback_is_called_when_it_is_done_or_at_once_and_done_it_stays(world: World) -> None:
    ends = Ends(world, 1000)
    called = threading.Event()
    transfer = ends.here.submit("write", [ends.piece])
    transfer.add_done_callback(lambda done: called.set() if done.done() else None)
    assert called.wait(PATIENCE_S)
    again: list[object] = []
    transfer.add_done_callback(again.append)
    assert again == [transfer]
    transfer.cancel()
    assert transfer.result().n_bytes == 1000


# What is refused.


def test_bounds_are_checked_here_with_offset_length_and_limit(world: World) -> None:
    here, there = world.open("here"), world.open("there")
    local, remote = here.allocate(1000).region, there.allocate(500).region
    with pytest.raises(Rejected, match=r"100 bytes at remote offset 450.*500 bytes"):
        move(here, "write", Piece(local, 0, remote, 450, 100))
    with pytest.raises(Rejected, match=r"100 bytes at local offset 950.*1000 bytes"):
        move(here, "read", Piece(local, 950, remote, 0, 100))
    with pytest.raises(Rejected, match="offset -1"):
        move(here, "read", Piece(local, 0, remote, -1, 100))


def test_the_owner_checks_bounds_whatever_the_peer_believes(world: World) -> None:
    ends = Ends(world, 500)
    local, remote = ends.local, ends.remote
    fill(local, 8)
    forged = msgspec.structs.replace(remote.region, length=10**12)
    for op in ("read", "write"):
        for offset in (450, 500, 10**11):
            with pytest.raises(Rejected, match=f"100 bytes at offset {offset} .*500 bytes"):
                move(ends.here, op, Piece(local.region, 0, forged, offset, 100))
    assert bytes(remote.view) == bytes(500)
    # A good piece beside a refused one does not hide it.
    with pytest.raises(Rejected):
        ends.move(
            "write",
            Piece(local.region, 0, remote.region, 0, 100),
            Piece(local.region, 200, forged, 450, 100),
            Piece(local.region, 400, remote.region, 200, 100),
        )
    ends.move()  # the path is in order afterwards
    assert remote.view == local.view


def test_a_region_that_is_unknown_or_was_taken_back_is_refused(world: World) -> None:
    ends = Ends(world, 100)
    forged = msgspec.structs.replace(ends.remote.region, key=os.urandom(16))
    with pytest.raises(Rejected, match="no region of this key"):
        ends.move("read", Piece(ends.local.region, 0, forged, 0, 100))
    ends.move("read")
    with pytest.raises(Rejected, match="not a region"):
        ends.here.unregister(ends.remote.region)
    ends.there.unregister(ends.remote.region)
    fill(ends.local, 9)
    with pytest.raises(Rejected, match="no region of this key"):
        ends.move()
    assert bytes(ends.remote.view) == bytes(100)
    with pytest.raises(Rejected, match="not a region"):
        ends.there.unregister(ends.remote.region)


def test_a_local_region_that_is_not_ours_is_refused(world: World) -> None:
    ends = Ends(world, 100)
    gone = ends.here.allocate(100).region
    ends.here.unregister(gone)
    for region in (ends.there.allocate(100).region, gone):
        with pytest.raises(Rejected, match="register it first"):
            ends.move("write", Piece(region, 0, ends.remote.region, 0, 100))


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


def test_a_segment_that_was_closed_or_that_nobody_has_heard_of_is_lost(world: World) -> None:
    ends = Ends(world, 100)
    nobody = Region("nobody", 1, bytes(16), 100)
    with pytest.raises(Lost, match="nobody is not in the metadata store"):
        ends.move("read", Piece(ends.local.region, 0, nobody, 0, 100))
    ends.move()
    ends.there.close()
    with pytest.raises(Lost):
        ends.move()


# Stopping.


def stuck(world: World, n_bytes: int) -> Ends:
    """Ends whose transfers don't get anywhere by themselves."""
    return Ends(world, n_bytes, here=slowed(world, 600))


def test_a_transfer_goes_on_while_it_is_waited_for_and_ends_when_cancelled(world: World) -> None:
    ends = stuck(world, 10 * MIB)
    transfer = ends.here.submit("write", [ends.piece])
    with pytest.raises(TimedOut, match="it goes on"):
        transfer.result(0.01)
    assert not transfer.done()
    transfer.cancel()
    with pytest.raises(Cancelled, match="write of 10485760 bytes"):
        transfer.result(PATIENCE_S)
    transfer.cancel()
    assert ends.here.stats().n_live == 0


def test_a_deadline_ends_a_transfer(world: World) -> None:
    ends = stuck(world, 10 * MIB)
    with pytest.raises(TimedOut, match=r"not done after 0\.05 s"):
        ends.move(deadline_s=0.05)
    with pytest.raises(TimedOut):
        ends.move(deadline_s=0.0)


def test_closing_the_engine_cancels_what_is_live(world: World) -> None:
    ends = stuck(world, 1000)
    here, pieces = ends.here, [ends.piece]
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
    remote = there.allocate(100_000)
    fill(remote, 11)
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


def test_a_view_of_our_own_memory_needs_nobody(world: World) -> None:
    here = world.open("here")
    memory = here.allocate(100)
    fill(memory, 12)
    view = here.view(memory.region, 10, 20)
    if world.on_device in ("both", "here"):
        assert view is None, "device memory is not to be looked at"
        return
    assert view == memory.view[10:30]
    assert view is not None
    assert view.readonly


# Another process.


def test_bytes_cross_process_borders_both_ways(far_world: World) -> None:
    size = 3 * MIB + 17
    ends = FarEnds(far_world, size)
    report = ends.move("read")
    assert bytes(ends.local.view) == segment_pattern(size)
    assert report.path == (far_world.kind.split(",")[0],)
    fill(ends.local, 13)
    ends.move("write")
    assert ends.there.ask("digest") == str(checksum(ends.local.view))


def test_another_process_refuses_what_it_has_taken_back(far_world: World) -> None:
    ends = FarEnds(far_world, 1000)
    fill(ends.local, 14)
    ends.move("write")
    before = ends.there.ask("digest")
    ends.there.ask("unregister")
    fill(ends.local, 15)
    with pytest.raises(Rejected, match="no region of this key"):
        ends.move("write")
    assert ends.there.ask("digest") == before
    assert (ends.here.view(ends.local.region, 0, 10) is None) == bool(far_world.on_device)


def test_a_peer_that_is_killed_in_the_middle_is_lost_and_nothing_hangs(far_world: World) -> None:
    ends = FarEnds(far_world, 4 * MIB)
    ends.move("write")
    transfers = [ends.here.submit("write", [ends.piece], PATIENCE_S) for _ in range(200)]
    transfers[3].result(PATIENCE_S)
    ends.there.kill()
    for i, transfer in enumerate(transfers):
        with contextlib.suppress(*([Lost] if i != 3 else [])):
            transfer.result(PATIENCE_S)
    with pytest.raises(Lost, match="there"):
        ends.move("read")
    ends.here.check()


def test_a_restarted_peer_is_another_one(far_world: World) -> None:
    ends = FarEnds(far_world, 1000)
    ends.move("read")
    ends.there.kill()
    second = far_world.start("there", 2, 1000)
    fill(ends.local, 16)
    with pytest.raises(Rejected, match=r"generation 2 now.*generation 1"):
        ends.move("write")
    assert second.ask("digest") == str(checksum(memoryview(segment_pattern(1000))))
    ends.move("write", Piece(ends.local.region, 0, second.region, 0, 1000))
    assert second.ask("digest") == str(checksum(ends.local.view))


def test_a_peer_that_stands_still_costs_no_more_than_the_deadline(make_world: Any) -> None:
    ends = FarEnds(make_world("tcp"), 32 * MIB)
    ends.move("write", Piece(ends.local.region, 0, ends.there.region, 0, 1000))
    with standing_still(ends.there.pid):
        with pytest.raises(TimedOut, match="segment there at 127"):
            ends.move("write", deadline_s=0.3)
        transfer = ends.here.submit("read", [ends.piece], PATIENCE_S)
        transfer.cancel()
        with pytest.raises(Cancelled):
            transfer.result(PATIENCE_S)
    ends.move("write")


def test_a_peer_that_stands_still_delays_no_other_peer(make_world: Any) -> None:
    world = make_world("tcp")
    here = world.open("here")
    still, live = world.start("still", 1, MIB), world.open("live")
    local, remote = here.allocate(MIB), live.allocate(MIB)
    with standing_still(still.pid):
        stuck_ones = [
            here.submit("write", [Piece(local.region, 0, still.region, 0, MIB)], PATIENCE_S)
            for _ in range(40)
        ]
        for _ in range(20):
            move(here, "write", Piece(local.region, 0, remote.region, 0, MIB))
        assert not any(transfer.done() for transfer in stuck_ones)
