"""Membership: who is there, who is gone, and what an outage of the metadata server changes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from halfmoon_metadata import MemoryStore, MetadataUnreachable
from halfmoon_metadata.start_counter import ImplausibleGeneration
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.clock import FakeClock
from halfmoon_runtime.membership import (
    MEMBERS,
    SEGMENTS,
    MemberChanged,
    MemberEvent,
    MemberGone,
    MemberJoined,
    Membership,
    Superseded,
    next_generation,
    watch_members,
)
from halfmoon_transfer.metadata import descriptor
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor
from tests.runtime.service_parts import info_of, until

KEY = MEMBERS + "decode-0"
LAYOUT = KvLayout(model="m", n_layers=2, n_kv_heads=1, head_dim=4, dtype="float32", block_size=16)


class ShakyStore(MemoryStore):
    """A store that can be away, with leases by a clock moved by hand."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        super().__init__(self.clock.now)
        self.away = False
        #: Calls that found it away.
        self.n_refused = 0
        self.n_written = 0

    def _check_away(self) -> None:
        if self.away:
            self.n_refused += 1
            raise MetadataUnreachable("away")

    def get(self, key: str) -> bytes | None:
        self._check_away()
        return super().get(key)

    def list(self, prefix: str) -> dict[str, bytes]:
        self._check_away()
        return super().list(prefix)

    def increment(self, key: str) -> int:
        self._check_away()
        return super().increment(key)

    def compare_and_swap(self, *args: Any, **kwargs: Any) -> bool:
        self._check_away()
        swapped = super().compare_and_swap(*args, **kwargs)
        self.n_written += swapped
        return swapped


@pytest.fixture
def store() -> ShakyStore:
    return ShakyStore()


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfmoon_runtime.membership._RETRY_S", 0.005)


def worker(generation: int = 1, name: str = "decode-0", **changes: Any) -> WorkerInfo:
    fields = {"role": "decode", "commands": f"tcp://127.0.0.1:{generation}", "layout": LAYOUT}
    return info_of(name, generation=generation, **{**fields, **changes})


def record(store: ShakyStore) -> WorkerInfo | None:
    value = MemoryStore.get(store, KEY)
    return None if value is None else msgspec.json.decode(value, type=WorkerInfo)


async def joined(store: ShakyStore, info: WorkerInfo | None = None, **options: Any) -> Membership:
    member = Membership(store, info or worker(), **options)
    await member.join()
    return member


async def test_a_lost_counter_starts_again_above_records_there(store: ShakyStore) -> None:
    earlier = worker(generation=7)
    await Membership(store, earlier).join()
    assert await next_generation(store, earlier.worker_id) == 8
    # A worker was killed after it wrote its segment's record again, and before its member's.
    segment = SegmentDescriptor("kvstore-0", generation=6, host_id="here", endpoints={})
    store.put(descriptor.PREFIX + segment.name, descriptor.encode(segment))
    assert await next_generation(store, WorkerId(segment.name)) == 7


async def test_a_start_is_above_the_counter_and_the_remembered_one(store: ShakyStore) -> None:
    decode = WorkerId("decode-0")
    assert [await next_generation(store, decode) for _ in range(2)] == [1, 2]
    assert await next_generation(store, decode, above=20) == 21
    assert await next_generation(store, decode, above=3) == 22


async def test_keeping_alive_outlives_an_outage_and_a_lease_that_ran_out(store: ShakyStore) -> None:
    member = await joined(store, ttl_s=0.03)
    keeping = asyncio.create_task(member.keep_alive())
    store.away = True
    await until(lambda: store.n_refused > 3)
    store.clock.advance(1)
    assert record(store) is None
    store.away = False
    await until(lambda: record(store) == worker())
    assert not keeping.done()
    keeping.cancel()


async def test_a_later_start_takes_the_record_and_the_earlier_one_stops(store: ShakyStore) -> None:
    old, new = Membership(store, worker(1), ttl_s=0.03), Membership(store, worker(2), ttl_s=0.03)
    await old.join()
    keeping = asyncio.create_task(old.keep_alive())
    await new.join()
    with pytest.raises(Superseded, match=r"decode-0 of generation 1 .* generation 2"):
        async with asyncio.timeout(60):
            await keeping
    with pytest.raises(Superseded):
        await old.join()
    with pytest.raises(Superseded):
        await old.update(worker(1, draining=True))
    await old.leave()
    assert record(store) == worker(2), "leaving removes only one's own record"
    await new.leave()
    assert record(store) is None


async def test_a_changed_record_is_written_at_once_or_after_an_outage(store: ShakyStore) -> None:
    member = await joined(store, ttl_s=0.03)
    await member.update(worker(n_blocks=7))
    assert record(store) == worker(n_blocks=7)
    store.away = True
    await member.update(worker(draining=True))
    store.away = False
    assert record(store) == worker(n_blocks=7)
    keeping = asyncio.create_task(member.keep_alive())
    await until(lambda: record(store) == worker(draining=True))
    keeping.cancel()


async def test_after_leaving_nothing_writes_the_record_again(store: ShakyStore) -> None:
    member = await joined(store, ttl_s=0.01)
    keeping = asyncio.create_task(member.keep_alive())
    await member.leave()
    async with asyncio.timeout(60):
        await keeping
    await member.update(worker(draining=True))
    assert record(store) is None


async def test_a_renewal_cancelled_in_its_thread_writes_no_more(store: ShakyStore) -> None:
    member = await joined(store, ttl_s=0.03)
    reached, go_on = threading.Event(), threading.Event()

    def swap(*args: Any, **fields: Any) -> bool:
        store.compare_and_swap = real  # type: ignore[method-assign]
        reached.set()
        go_on.wait(30)
        return real(*args, **fields)

    real = store.compare_and_swap
    store.compare_and_swap = swap  # type: ignore[method-assign]
    renewing = asyncio.create_task(member.keep_alive())
    await asyncio.to_thread(reached.wait, 30)
    renewing.cancel()
    leaving = asyncio.create_task(member.leave())
    await asyncio.wait([renewing, leaving], timeout=0.2)
    go_on.set()
    await asyncio.wait([renewing, leaving])
    await asyncio.get_running_loop().shutdown_default_executor()  # all writes are over
    assert record(store) is None


async def test_leaving_while_the_server_is_away_lets_the_lease_run_out(store: ShakyStore) -> None:
    member = await joined(store, ttl_s=1)
    store.away = True
    await member.leave()
    assert record(store) == worker()
    store.clock.advance(1)
    assert record(store) is None


@pytest.mark.parametrize("change", ["leave", "update"])
async def test_a_server_that_never_answers_does_not_keep_a_worker(
    store: ShakyStore, change: str
) -> None:
    member = await joined(store, ttl_s=0.03)
    asked, go_on = threading.Event(), threading.Event()

    def never(key: str) -> bytes | None:
        asked.set()
        go_on.wait(300)
        raise MetadataUnreachable("no answer")

    store.get = never  # type: ignore[method-assign]
    renewing = asyncio.create_task(member.keep_alive())
    try:
        await asyncio.to_thread(asked.wait, 30)
        async with asyncio.timeout(100):
            if change == "leave":
                renewing.cancel()
                await asyncio.wait([renewing])
                await member.leave()
            else:
                await member.update(worker(draining=True))
        assert not go_on.is_set()
    finally:
        renewing.cancel()
        go_on.set()


async def test_what_a_lost_record_promises_is_written_before_it(store: ShakyStore) -> None:
    seen: list[Any] = []
    member = Membership(store, worker(), ttl_s=0.01, restore=lambda: seen.append(record(store)))
    await member.join()
    assert seen == [None]
    keeping = asyncio.create_task(member.keep_alive())
    written = store.n_written
    await until(lambda: store.n_written >= written + 2)
    assert seen == [None], "it was not lost"
    store.delete(KEY)
    await until(lambda: record(store) == worker())
    assert seen == [None, None]
    keeping.cancel()


async def test_a_member_stays_away_while_its_promise_can_t_be_written(store: ShakyStore) -> None:
    tries: list[Any] = []

    def restore() -> None:
        tries.append(record(store))
        if len(tries) == 1:
            raise MetadataUnreachable("away")

    await Membership(store, worker(), restore=restore).join()
    assert tries == [None, None]


async def test_a_foreign_record_under_our_name_is_replaced(store: ShakyStore) -> None:
    for foreign in (b"nonsense", msgspec.json.encode(worker(9, name="decode-1"))):
        store.put(KEY, foreign)
        await joined(store)
        assert record(store) == worker()


@asynccontextmanager
async def watched(store: ShakyStore, rejoin_s: float = 1e9) -> AsyncIterator[Callable[[], Any]]:
    """The next change that a watcher sees; in the end there is none that was not asked for."""
    seen: asyncio.Queue[MemberEvent] = asyncio.Queue()

    async def watch() -> None:
        async for event in watch_members(store, interval_s=0.005, rejoin_s=rejoin_s):
            seen.put_nowait(event)

    watching = asyncio.create_task(watch())

    async def next_change() -> MemberEvent:
        async with asyncio.timeout(60):
            return await seen.get()

    yield next_change
    watching.cancel()
    await asyncio.wait({watching})
    assert seen.empty()


@pytest.fixture
async def changes(store: ShakyStore) -> AsyncIterator[Callable[[], Any]]:
    """The next change that a watcher sees."""
    async with watched(store) as next_change:
        yield next_change


async def test_a_conductor_sees_who_comes_and_goes(
    store: ShakyStore, changes: Callable[[], Any]
) -> None:
    first = Membership(store, worker(1), ttl_s=1)
    await first.join()
    assert await changes() == MemberJoined(worker(1))
    await first.update(worker(1, draining=True))
    assert await changes() == MemberChanged(worker(1, draining=True))
    await Membership(store, worker(2), ttl_s=1).join()
    assert await changes() == MemberGone(WorkerId("decode-0"), 1)
    assert await changes() == MemberJoined(worker(2))
    other = Membership(store, worker(1, name="prefill-0"), ttl_s=5)
    await other.join()
    assert await changes() == MemberJoined(worker(1, name="prefill-0"))
    store.clock.advance(1)
    assert await changes() == MemberGone(WorkerId("decode-0"), 2)
    await other.leave()
    assert await changes() == MemberGone(WorkerId("prefill-0"), 1)


async def test_an_outage_makes_nobody_gone(store: ShakyStore, changes: Callable[[], Any]) -> None:
    await joined(store)
    assert await changes() == MemberJoined(worker())
    store.away = True
    await until(lambda: store.n_refused > 3)
    store.away = False
    await Membership(store, worker(name="decode-1")).join()
    assert await changes() == MemberJoined(worker(name="decode-1")), "and nothing before it"


async def lose_records(store: ShakyStore) -> None:
    """Take the server away until a watcher notices, and bring it back when leases have expired."""
    store.away = True
    await until(lambda: store.n_refused > 3)
    store.clock.advance(1)
    store.away = False


async def test_a_worker_whose_record_is_lost_in_an_outage_is_kept_while_it_writes_it_again(
    store: ShakyStore, changes: Callable[[], Any]
) -> None:
    lost = Membership(store, worker(), ttl_s=1)
    await lost.join()
    assert await changes() == MemberJoined(worker())
    await lose_records(store)
    await Membership(store, worker(name="decode-1")).join()
    assert await changes() == MemberJoined(worker(name="decode-1")), "and nothing before it"
    await lost.join()
    await lost.update(worker(1, draining=True))
    assert await changes() == MemberChanged(worker(1, draining=True))


async def test_a_worker_that_never_writes_its_lost_record_is_gone(store: ShakyStore) -> None:
    async with watched(store, rejoin_s=0.01) as changes:
        await Membership(store, worker(), ttl_s=1).join()
        assert await changes() == MemberJoined(worker())
        await lose_records(store)
        assert await changes() == MemberGone(WorkerId("decode-0"), 1)


async def test_broken_records_are_passed_over(
    store: ShakyStore, changes: Callable[[], Any]
) -> None:
    stranger = msgspec.json.encode(worker())
    for i, value in enumerate((b"\xff\x00", b"", b"[1, 2]", b"[" * 10_000, stranger)):
        store.put(f"{MEMBERS}other-{i}", value)
    await Membership(store, worker(name="zoe")).join()
    assert await changes() == MemberJoined(worker(name="zoe"))
    store.put(MEMBERS + "zoe", b"now nonsense")
    assert await changes() == MemberGone(WorkerId("zoe"), 1)


async def test_a_record_of_an_impossible_generation_keeps_no_worker_counting(
    store: ShakyStore,
) -> None:
    store.put(MEMBERS + "decode-0", msgspec.json.encode(info_of(generation=2**40)))
    with pytest.raises(ImplausibleGeneration, match="delete that record"):
        await next_generation(store, WorkerId("decode-0"))
    store.delete(MEMBERS + "decode-0")
    store.put(SEGMENTS + "decode-0", b'{"generation": 1099511627776}')
    with pytest.raises(ImplausibleGeneration, match=r"'halfmoon/segments/decode-0'.*delete"):
        await next_generation(store, WorkerId("decode-0"))


async def test_a_lease_waits_behind_no_other_call_of_the_process(store: ShakyStore) -> None:
    """A settlement with a frozen peer takes seconds, and some twenty come at once."""
    loop, over = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(2))
    waiting = [loop.run_in_executor(None, over.wait) for _ in range(20)]
    try:
        membership = Membership(store, worker())
        async with asyncio.timeout(20):
            await membership.join()
            await membership.update(worker(draining=True))
            written = record(store)
            assert written is not None and written.draining
            await membership.leave()
        assert record(store) is None
    finally:
        over.set()
    await asyncio.gather(*waiting)
