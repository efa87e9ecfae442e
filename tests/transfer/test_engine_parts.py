"""The engine's parts by themselves: publishing, couriers, deadlines, regions."""

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from halfmoon_metadata.store_interface import MetadataUnreachable
from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_transfer import (
    Lost,
    Overloaded,
    Piece,
    Rejected,
    TimedOut,
    TransferEngine,
    TransferError,
    TransferSettings,
)
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan
from halfmoon_transfer.backends.memory_backend import MemoryBackend
from halfmoon_transfer.metadata import descriptor as records
from halfmoon_transfer.regions.access import AccessRefused
from halfmoon_transfer.regions.region_table import RegionTable
from halfmoon_transfer.threads.deadline_watcher import DeadlineWatcher
from halfmoon_transfer.threads.fair_thread_pool import FairThreadPool

Eventually = Callable[..., None]
PATIENCE_S = 60.0


# The segment's record.


def test_a_segment_is_published_without_keys_and_withdrawn() -> None:
    store = MemoryStore()
    with TransferEngine.open("here", metadata=store, generation=3) as engine:
        memory = engine.allocate(10)
        value = store.get("halfmoon/segments/here")
        assert value is not None
        found = records.decode(value)
        assert (found.name, found.generation) == ("here", 3)
        assert set(found.endpoints) == {"shm", "tcp"}
        assert memory.region.key.hex().encode() not in value
        del memory
    assert store.get("halfmoon/segments/here") is None


def test_a_record_that_the_store_lost_comes_back(eventually: Eventually) -> None:
    store = MemoryStore()
    settings = TransferSettings(lease_s=0.05)
    with TransferEngine.open("here", metadata=store, settings=settings):
        store.delete("halfmoon/segments/here")
        eventually(lambda: store.get("halfmoon/segments/here") is not None)


def test_an_owner_can_restore_its_record_before_the_next_renewal_unless_a_later_start_has() -> None:
    store = MemoryStore()
    with TransferEngine.open("here", metadata=store, generation=1) as engine:
        store.delete("halfmoon/segments/here")
        engine.restore_record()
        assert store.get("halfmoon/segments/here") is not None
        with TransferEngine.open("here", metadata=store, generation=2):
            later = store.get("halfmoon/segments/here")
            engine.restore_record()
            assert store.get("halfmoon/segments/here") == later
    engine.restore_record()
    assert store.get("halfmoon/segments/here") is None, "it is closed"


def test_a_metadata_server_that_never_answers_does_not_keep_an_engine_open(
    eventually: Eventually,
) -> None:
    class Silent(MemoryStore):
        go_on = threading.Event()
        is_silent = False

        def compare_and_swap(self, *arguments: Any, **more: Any) -> bool:
            if self.is_silent:
                self.go_on.wait(300)
            return super().compare_and_swap(*arguments, **more)

    store = Silent()
    engine = TransferEngine.open("here", metadata=store)
    store.is_silent = True
    engine.close()
    assert not store.go_on.is_set()
    store.go_on.set()
    eventually(lambda: not any("-here-" in thread.name for thread in threading.enumerate()))


def test_the_record_of_a_process_that_died_ends_with_its_lease() -> None:
    now = [0.0]
    store = MemoryStore(lambda: now[0])
    with TransferEngine.open("here", metadata=store):
        now[0] = TransferSettings().lease_s - 1
        assert store.get("halfmoon/segments/here") is not None
        now[0] = TransferSettings().lease_s + 1
        assert store.get("halfmoon/segments/here") is None


def test_generations_are_counted_also_above_a_record_whose_counter_the_store_lost() -> None:
    store = MemoryStore()
    seen = []
    for _ in range(3):
        with TransferEngine.open("here", metadata=store, backends=("memory",)) as engine:
            seen.append(engine.generation)
    assert seen == sorted(set(seen))
    store.put(records.PREFIX + "a", records.encode(records.SegmentDescriptor("a", 6, "here", {})))
    with TransferEngine.open("a", metadata=store, backends=["memory"]) as engine:
        assert engine.generation == 7
    store.put(records.PREFIX + "b", records.encode(records.SegmentDescriptor("b", 2**40, "h", {})))
    with pytest.raises(Rejected, match="delete that record"):
        TransferEngine.open("b", metadata=store, backends=["memory"])


def test_a_later_start_replaces_the_record_and_an_earlier_one_may_not() -> None:
    store = MemoryStore()
    first = TransferEngine.open("here", metadata=store, generation=1, backends=("memory",))
    second = TransferEngine.open("here", metadata=store, generation=2, backends=("memory",))
    first.close()
    value = store.get("halfmoon/segments/here")
    assert value is not None
    assert records.decode(value).generation == 2
    with pytest.raises(Rejected, match="generation 2 already"):
        TransferEngine.open("here", metadata=store, generation=1, backends=("memory",))
    second.close()


def test_an_engine_that_can_not_publish_leaves_nothing_open() -> None:
    class Down(MemoryStore):
        def get(self, key: str) -> bytes | None:
            raise MetadataUnreachable(f"no answer for {key}")

    with pytest.raises(MetadataUnreachable):
        TransferEngine.open("here", metadata=Down(), generation=1)


def test_a_store_that_is_down_makes_peers_lost_not_hang(make_world: Any) -> None:
    class Flaky(MemoryStore):
        down = False

        def get(self, key: str) -> bytes | None:
            if self.down:
                raise MetadataUnreachable("no answer")
            return super().get(key)

    world = make_world("memory")
    store = world.metadata = Flaky()
    here, there = world.open("here"), world.open("there")
    pieces = [Piece(here.allocate(10).region, 0, there.allocate(10).region, 0, 10)]
    store.down = True
    with pytest.raises(Lost, match="can't be looked up: no answer"):
        here.submit("read", pieces).result(PATIENCE_S)
    store.down = False
    here.submit("read", pieces).result(PATIENCE_S)
    # From here on the descriptor is known.
    store.down = True
    here.submit("read", pieces).result(PATIENCE_S)
    store.down = False


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201])
def test_a_name_that_does_not_print_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="segment name"):
        TransferEngine.open(name, metadata=MemoryStore())


# Couriers.


def test_a_peer_never_gets_more_than_its_lanes() -> None:
    couriers = FairThreadPool("halfmoon-transfer-test", threads=8, lanes=2)
    running, most, done = 0, 0, threading.Semaphore(0)
    lock = threading.Lock()

    def job() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002)
        with lock:
            running -= 1
        done.release()

    for _ in range(30):
        couriers.submit("peer", job)
        couriers.check()
    for _ in range(30):
        assert done.acquire(timeout=PATIENCE_S)
    couriers.close()
    assert most == 2


def test_peers_take_turns_and_one_that_hangs_delays_nobody() -> None:
    couriers = FairThreadPool("halfmoon-transfer-test", threads=3, lanes=2)
    gate, done = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        gate.wait(PATIENCE_S)

    for _ in range(10):
        couriers.submit("hanging", hang)
    for number in range(50):
        couriers.submit(f"peer-{number % 3}", done.release)
    for _ in range(50):
        assert done.acquire(timeout=PATIENCE_S)
    couriers.check()
    gate.set()
    couriers.close()


@pytest.mark.parametrize("n_idle", [0, 1, 2])
def test_all_lanes_of_a_peer_are_used_however_many_threads_were_idle(
    eventually: Eventually, n_idle: int
) -> None:
    couriers = FairThreadPool("halfmoon-transfer-test", threads=8, lanes=3)
    warm_up, together = threading.Barrier(max(1, n_idle)), threading.Barrier(3)
    for number in range(n_idle):
        couriers.submit(f"other-{number}", lambda: _meet(warm_up))
    eventually(lambda: couriers.n_idle >= n_idle)
    met = threading.Semaphore(0)

    def resolve_peer() -> None:
        _meet(together)
        met.release()

    for _ in range(3):
        couriers.submit("peer", resolve_peer)
    for _ in range(3):
        assert met.acquire(timeout=PATIENCE_S)
    couriers.check()
    couriers.close()


def _meet(barrier: threading.Barrier) -> None:
    barrier.wait(PATIENCE_S)


def test_idle_couriers_go_home(eventually: Eventually) -> None:
    couriers = FairThreadPool("halfmoon-transfer-test", threads=3, lanes=2, linger_s=0.02)
    done = threading.Event()
    couriers.submit("peer", done.set)
    assert done.wait(PATIENCE_S)
    eventually(lambda: couriers.n_threads == 0)
    again = threading.Event()
    couriers.submit("peer", again.set)
    assert again.wait(PATIENCE_S)
    couriers.close()


# Deadlines.


class Due:
    def __init__(self, in_s: float) -> None:
        self.deadline = time.monotonic() + in_s


def test_what_is_overdue_is_reported_once_and_what_is_done_never() -> None:
    overdue: list[Due] = []
    seen = threading.Semaphore(0)

    def on_overdue(item: Due) -> None:
        overdue.append(item)
        seen.release()

    deadlines = DeadlineWatcher("halfmoon-transfer-test", on_overdue)
    far, near, done = Due(600), Due(0.05), Due(0.02)
    for item in (far, near, done):
        deadlines.watch(item)
    deadlines.forget(done)
    assert seen.acquire(timeout=PATIENCE_S)
    nearer = Due(0.0)
    deadlines.watch(nearer)
    assert seen.acquire(timeout=PATIENCE_S)
    deadlines.close()
    assert overdue == [near, nearer]


# Regions.


def test_removing_a_region_waits_for_its_last_access() -> None:
    table = RegionTable("here", 1)
    region = table.register(memoryview(bytearray(10)), "*")
    with table.leases.lease(1, region.key, 2, 3, write=True) as view:
        assert len(view) == 3
        entry = table.remove(region.key)
        assert entry is not None
        assert not table.leases.wait_until_idle(entry, 0.01)
        with pytest.raises(AccessRefused), table.leases.lease(1, region.key, 0, 1, write=False):
            pass
    assert table.leases.wait_until_idle(entry, 0)
    table.check()


@pytest.mark.parametrize("buffer", [bytearray(0), memoryview(bytearray(10))[::2]])
def test_a_buffer_that_can_not_be_moved_is_not_registered(buffer: Any) -> None:
    with (
        TransferEngine.open("here", metadata=MemoryStore(), backends=("memory",)) as engine,
        pytest.raises(ValueError, match="contiguous"),
    ):
        engine.register(buffer)


# The engine under load.


SLOW = FaultInjection("memory", FaultPlan(delay_s=600))


def test_live_transfers_are_bounded(make_world: Any) -> None:
    world = make_world("memory")
    here = world.open("here", backends=(SLOW,), settings=TransferSettings(max_live=5))
    there = world.open("there")
    pieces = [Piece(here.allocate(10).region, 0, there.allocate(10).region, 0, 10)]
    live = [here.submit("read", pieces) for _ in range(5)]
    with pytest.raises(Overloaded, match="5 transfers are live"):
        here.submit("read", pieces).result(0)
    live[0].cancel()
    with pytest.raises(TransferError):
        live[0].result(PATIENCE_S)
    assert not here.submit("read", pieces).done()
    assert here.stats().n_live == 5


def test_a_transfer_behind_one_that_hangs_still_meets_its_own_deadline(make_world: Any) -> None:
    world = make_world("memory")
    here, there = world.open("here", backends=(SLOW,)), world.open("there")
    pieces = [Piece(here.allocate(10).region, 0, there.allocate(10).region, 0, 10)]
    patient = [here.submit("read", pieces, 600.0) for _ in range(10)]
    with pytest.raises(TimedOut):
        here.submit("read", pieces, 0.05).result(PATIENCE_S)
    assert not any(each.done() for each in patient)


def test_a_backend_with_a_fault_of_its_own_ends_in_lost(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    world = make_world("memory")
    here, there = world.open("here"), world.open("there")
    local, remote = here.register(bytearray(10)), there.register(bytearray(10))
    monkeypatch.setattr(MemoryBackend, "carry", explode)
    with pytest.raises(Lost, match="a mistake of ours"):
        here.submit("read", [Piece(local, 0, remote, 0, 10)]).result(PATIENCE_S)


@pytest.mark.parametrize(
    "change", [{"key": b"short"}, {"generation": -1}, {"length": 2**70}, {"generation": 2**64}]
)
def test_a_region_that_can_not_be_one_is_refused(change: dict[str, Any]) -> None:
    with TransferEngine.open("here", metadata=MemoryStore(), backends=("tcp",)) as here:
        local = here.register(bytearray(100))
        forged = msgspec.structs.replace(local, **change)
        with pytest.raises(Rejected):
            here.submit("read", [Piece(local, 0, forged, 0, 10)]).result(PATIENCE_S)
        with pytest.raises(ValueError, match="not a 'move'"):
            here.submit("move", [])  # type: ignore[arg-type]
