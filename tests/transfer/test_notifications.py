"""A notification arrives after the data, once, in a queue that has an end."""

import asyncio
import os
import threading
from collections import Counter
from typing import Any

import msgspec
import pytest

from halfmoon_protocol.regions import Region
from halfmoon_transfer import (
    Notification,
    Piece,
    Rejected,
    TransferEngine,
    TransferError,
    TransferSettings,
)
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan
from halfmoon_transfer.backends.shm import shm_wire
from halfmoon_transfer.backends.tcp import tcp_frames
from halfmoon_transfer.interface import MAX_NOTIFICATION_BYTES
from halfmoon_transfer.notification_queue import NotificationQueue
from halfmoon_transfer.planning.transfer_plan import OutgoingNotification
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus

World = Any
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def a_way_that_carries_notifications(request: pytest.FixtureRequest) -> None:
    if "world" in request.fixturenames:
        world = request.getfixturevalue("world")
        if not world.capabilities.notifications:
            pytest.skip(f"{world.kind} carries no notifications: the next path does")


def pair(world: World, **overrides: Any) -> tuple[TransferEngine, TransferEngine, Piece]:
    here, there = world.open("here"), world.open("there", **overrides)
    local, remote = here.allocate(200_000), there.allocate(200_000)
    return here, there, Piece(local.region, 0, remote.region, 0, 200_000)


# What every backend does.


def test_the_data_is_there_when_the_notification_is_and_that_when_the_transfer_is_done(
    world: World,
) -> None:
    here, there = world.open("here"), world.open("there")
    local, remote = here.allocate(300_000), there.allocate(300_000)
    piece = Piece(local.region, 0, remote.region, 0, 300_000)
    for number in range(1, 11):
        local.view[:] = bytes([number]) * 300_000
        transfer = here.submit("write", [piece], PATIENCE_S, notify=bytes([number]))
        assert there.notifications(PATIENCE_S) == Notification("here", bytes([number]))
        assert remote.view == local.view
        transfer.result(PATIENCE_S)
    report = here.submit("read", [piece], PATIENCE_S, notify=b"read").result(PATIENCE_S)
    assert there.notifications() == Notification("here", b"read")
    assert there.notifications() is None
    assert (report.n_bytes, report.path) == (300_000, (world.kind,))


def test_many_notifications_arrive_once_each(world: World) -> None:
    here, there, piece = pair(world)
    small = msgspec.structs.replace(piece, length=100)
    messages = [str(number).encode() for number in range(200)]
    transfers = [here.submit("write", [small], PATIENCE_S, notify=each) for each in messages]
    for transfer in transfers:
        transfer.result(PATIENCE_S)
    got = []
    while (notification := there.notifications()) is not None:
        got.append(notification.message)
    assert Counter(got) == Counter(messages)


def test_a_full_queue_refuses_and_says_so(world: World) -> None:
    here, there, piece = pair(
        world, settings=TransferSettings(max_notifications=2, cluster_key=world.key)
    )
    for message in (b"1", b"2"):
        here.submit("write", [piece], PATIENCE_S, notify=message).result(PATIENCE_S)
    with pytest.raises(Rejected, match="there has 2 unread notifications, the limit"):
        here.submit("write", [piece], PATIENCE_S, notify=b"3").result(PATIENCE_S)
    assert [there.notifications(), there.notifications(), there.notifications()] == [
        Notification("here", b"1"),
        Notification("here", b"2"),
        None,
    ]
    here.submit("write", [piece], PATIENCE_S, notify=b"4").result(PATIENCE_S)
    assert there.notifications() == Notification("here", b"4")


def test_a_transfer_that_fails_notifies_nobody(world: World) -> None:
    here, there, piece = pair(world)
    forged = msgspec.structs.replace(piece.remote, key=os.urandom(16))
    bad = msgspec.structs.replace(piece, remote=forged)
    with pytest.raises(Rejected, match="no region of this key"):
        here.submit("write", [piece, bad], PATIENCE_S, notify=b"done").result(PATIENCE_S)
    assert there.notifications() is None


def test_every_peer_of_a_transfer_is_told_also_one_with_nothing_to_move(world: World) -> None:
    here = world.open("here")
    theres = [world.open(f"there-{number}") for number in range(3)]
    local = here.allocate(1000)
    pieces = [
        Piece(local.region, 0, there.allocate(1000).region, 0, length)
        for there, length in zip(theres, (1000, 10, 0), strict=True)
    ]
    here.submit("write", pieces, PATIENCE_S, notify=b"all").result(PATIENCE_S)
    for there in theres:
        assert there.notifications() == Notification("here", b"all")
        assert there.notifications() is None


def test_an_engine_may_notify_itself(world: World) -> None:
    here = world.open("here")
    memory = here.allocate(100)
    piece = Piece(memory.region, 0, memory.region, 50, 50)
    here.submit("write", [piece], PATIENCE_S, notify=b"me").result(PATIENCE_S)
    assert here.notifications() == Notification("here", b"me")


def test_a_notification_has_a_limit_and_an_address(world: World) -> None:
    here, there, piece = pair(world)
    longest = os.urandom(MAX_NOTIFICATION_BYTES)
    here.submit("write", [piece], PATIENCE_S, notify=longest).result(PATIENCE_S)
    assert there.notifications() == Notification("here", longest)
    with pytest.raises(ValueError, match=r"4097 bytes.*at most 4096"):
        here.submit("write", [piece], notify=longest + b"!")
    with pytest.raises(ValueError, match="0 pieces"):
        here.submit("write", [], notify=b"to whom?")


def test_a_segment_of_another_generation_is_not_notified(world: World) -> None:
    here = world.open("here")
    local = here.allocate(10)
    first = world.open("there", generation=6)
    here.submit("write", [Piece(local.region, 0, first.allocate(10).region, 0, 10)]).result()
    first.close()
    second = world.open("there", generation=7)
    old = Region("there", 6, bytes(16), 10)
    with pytest.raises(Rejected, match="generation 7"):
        here.submit("write", [Piece(local.region, 0, old, 0, 0)], notify=b"x").result(PATIENCE_S)
    assert second.notifications() is None


async def test_notifications_can_be_awaited(world: World) -> None:
    here, there, piece = pair(world)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(there.next_notification(), 0.01)
    assert await there.next_notification(0.01) is None
    waiter = asyncio.create_task(there.next_notification(PATIENCE_S))
    await here.submit("write", [piece], PATIENCE_S, notify=b"awaited")
    assert await waiter == Notification("here", b"awaited")


async def test_a_cancellation_that_comes_with_a_notification_is_obeyed_and_loses_nothing() -> None:
    for turns in range(8):  # at whichever turn of the loop it comes
        inbox = NotificationQueue("there", 1, capacity=4)
        waiter = asyncio.create_task(inbox.wait(30.0))
        await asyncio.sleep(0)
        inbox.deliver(1, OutgoingNotification(b"id", "here", b"hello"))
        for _ in range(turns):
            await asyncio.sleep(0)
        if waiter.cancel():
            await asyncio.wait([waiter])
            assert waiter.cancelled(), f"lost after {turns} turns"
            assert inbox.take(0) == Notification("here", b"hello")


async def test_closing_the_engine_wakes_who_waits_for_notifications(world: World) -> None:
    there = world.open("there")
    waiter = asyncio.create_task(there.next_notification())
    failures: list[TransferError] = []

    def wait() -> None:
        try:
            there.notifications(PATIENCE_S)
        except TransferError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    await asyncio.sleep(0)
    there.close()
    with pytest.raises(TransferError, match="closed"):
        await waiter
    thread.join()
    assert len(failures) == 1


# Bad luck.


@pytest.mark.parametrize("inner", ["memory", "shm", "tcp"])
def test_what_is_sent_again_is_delivered_once(make_world: Any, inner: str) -> None:
    world = make_world(inner)
    faults = FaultInjection(inner, FaultPlan(seed=3, drop_rate=0.4))
    patient = TransferSettings(tries_per_path=40)
    here, there = world.open("here", backends=(faults,), settings=patient), world.open("there")
    local, remote = here.allocate(100), there.allocate(100)
    piece = Piece(local.region, 0, remote.region, 0, 100)
    for number in range(60):
        here.submit("write", [piece], PATIENCE_S, notify=bytes([number])).result(PATIENCE_S)
        assert there.notifications() == Notification("here", bytes([number]))
        assert there.notifications() is None
    assert here.stats().n_retries > 0


def test_a_way_that_carries_no_notifications_leaves_them_to_the_next(make_world: Any) -> None:
    world = make_world("memory,tcp")
    faults = FaultInjection("memory", FaultPlan(fail_after_n=1))
    here, there = world.open("here", backends=(faults, "tcp")), world.open("there")
    local, remote = here.allocate(100), there.allocate(100)
    piece = Piece(local.region, 0, remote.region, 0, 100)
    report = here.submit("write", [piece], PATIENCE_S, notify=b"around").result(PATIENCE_S)
    assert report.path == ("faults(memory)",)
    assert there.notifications() == Notification("here", b"around")


# The queue alone.


def test_the_inbox_knows_what_it_has_seen_and_of_which_start_it_is() -> None:
    inbox = NotificationQueue("there", 3, capacity=1)
    first, second = (OutgoingNotification(bytes([n]) * 16, "here", b"m") for n in (1, 2))
    inbox.deliver(3, first)
    inbox.deliver(3, first)
    with pytest.raises(AccessRefused) as full:
        inbox.deliver(3, second)
    assert (full.value.status, full.value.detail) == (AccessStatus.NO_ROOM, 1)
    # What was refused was not seen: it may come again.
    assert inbox.take(0) == Notification("here", b"m")
    inbox.deliver(3, first)
    assert inbox.take(0) is None
    inbox.deliver(3, second)
    assert inbox.take(0) == Notification("here", b"m")
    with pytest.raises(AccessRefused) as other:
        inbox.deliver(4, second)
    assert (other.value.status, other.value.detail) == (AccessStatus.OTHER_GENERATION, 3)
    inbox.check()


# On the wire.


def test_too_long_a_notice_is_refused_before_its_body_is_read() -> None:
    asked = tcp_frames.SliceRequest(bytes(16), 0, tcp_frames.MAX_NOTICE_BYTES + 1)
    frame = tcp_frames.encode_request(
        tcp_frames.TcpRequest(tcp_frames.NOTIFY, 1, 1, True, (asked,))
    )
    with pytest.raises(tcp_frames.TcpFrameError, match="8193 bytes, at most 8192"):
        tcp_frames.decode_request(
            frame[: tcp_frames.HEADER_BYTES], frame[tcp_frames.HEADER_BYTES :]
        )
    long = OutgoingNotification(bytes(16), "here", bytes(MAX_NOTIFICATION_BYTES + 1))
    with pytest.raises(shm_wire.ShmWireError, match="4097 bytes"):
        shm_wire.decode_request(shm_wire.encode_notification(shm_wire.ShmNotification(1, long)))
