"""Mutated records in a real Redis: each reader logs or refuses them, and goes on.

Records of workers, of groups, of segments, of shared objects and counters are mutated as values
and as bytes. A conductor over ZeroMQ follows all of them while a victim generates; starting
workers, renewals, transfers and commands read them one by one.
`make fuzz N=20000 FUZZERS=tests/fuzz/test_metadata_records.py` tries many.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_metadata import open_store
from halfmoon_metadata.start_counter import ImplausibleGeneration
from halfmoon_metadata.store_interface import MAX_VALUE_BYTES, MetadataError, MetadataStore
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import Stage, WorkerInfo
from halfmoon_protocol.regions import Region
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.membership import (
    GENERATIONS,
    MEMBERS,
    Membership,
    Superseded,
    list_members,
    next_generation,
)
from halfmoon_testing.fuzz_inputs import cut_anywhere, mutate_bytes, mutate_value, n_fuzz_inputs
from halfmoon_testing.scheduling_inputs import a_worker
from halfmoon_transfer import Piece, TransferEngine, TransferError, TransferSettings
from halfmoon_transfer.metadata import descriptor as records
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor
from halfmoon_transfer.metadata.segment_directory import SegmentDirectory
from halfmoon_transfer.p2p import object_record
from halfmoon_transfer.p2p.object_record import BufferPlace, ObjectRecord, ShardHolder, ShardSource
from tests.fuzz.conftest import noted
from tests.installed_programs import skip_without
from tests.metadata.conftest import RedisServer
from tests.services.conftest import open_cluster

pytestmark = pytest.mark.timeout(14_400)
N = n_fuzz_inputs(200)
#: Records that are written before the conductor reads again.
N_AT_ONCE = 40
PATIENCE_S = 60.0
ORACLE = FakeEngine()
NAMES = tuple(f"{role}-{i}" for role in ("prefill", "decode", "kvstore") for i in range(90, 95))


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    skip_without("redis-server")
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture
def store(redis: RedisServer) -> Iterator[MetadataStore]:
    opened = open_store(f"redis://127.0.0.1:{redis.port}/0")
    for key in opened.list("halfmoon/"):
        opened.delete(key)
    yield opened
    opened.close()


def mutant(dice: Random, value: bytes) -> bytes:
    """Return a record with some of its values or bytes changed."""
    match dice.random():
        case x if x < 0.1:
            return mutate_bytes(dice, value)
        case x if x < 0.15:
            return cut_anywhere(dice, value)
        case x if x < 0.2:
            odd = (b"", b"null", b"[]", b"1", b'"x"', b"\xff\xfe", b"[" * 50_000, b'{"a":' * 50_000)
            return dice.choice(odd)
    try:
        content = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return mutate_bytes(dice, value)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        content = mutate_value(dice, content)
    try:
        return msgspec.json.encode(content)[:MAX_VALUE_BYTES]
    except (UnicodeEncodeError, RecursionError, OverflowError):
        return b'{"a":' * 50_000


def worker_record(dice: Random, name: str) -> WorkerInfo:
    stage = Stage("g", dice.randrange(2), 2) if dice.random() < 0.4 else None
    dead = dice.choice(("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"))
    info = a_worker(name, layout=ORACLE.layout, model="m", stage=stage if "pre" in name else None)
    return msgspec.structs.replace(info, commands=dead, events=dead)


# -- a conductor -------------------------------------------------------------------------------


async def test_a_conductor_goes_on_beside_broken_records_of_workers(
    store: MetadataStore, dice: Random
) -> None:
    network: Any = ZmqNetwork()
    n_lines: Counter[str] = Counter()
    began_s = time.monotonic()
    with capture_logs() as logs:
        async with open_cluster(network=network, store=store) as cluster:
            for start in range(0, N, N_AT_ONCE):
                for _ in range(min(N - start, N_AT_ONCE)):
                    name = dice.choice(NAMES)
                    record = mutant(dice, msgspec.json.encode(worker_record(dice, name)))
                    shape = dice.choice(("", "", "", "", "/x", "\0", "ü"))
                    key = MEMBERS + name + shape
                    if dice.random() < 0.1:
                        store.delete(key)
                    else:
                        store.put(key, record, ttl_s=PATIENCE_S)
                # A right record that comes after the others: when it is read, they were.
                last = f"prefill-{1000 + start}"
                known = worker_record(dice, last)
                store.put(MEMBERS + last, msgspec.json.encode(known), ttl_s=PATIENCE_S)
                victim = asyncio.create_task(cluster.generate(range(40), 6))
                await cluster.until(partial(cluster.hub._members.__contains__, WorkerId(last)))
                async with asyncio.timeout(PATIENCE_S):
                    assert await victim == ORACLE.expected(range(40), 6)
                cluster.core.check()
                for info in (await list_members(store)).values():
                    assert store.get(MEMBERS + info.worker_id) is not None
                n_lines.update(f"{line['log_level']}: {line['event']}" for line in logs)
                faults = [line for line in logs if line["log_level"] in ("error", "critical")]
                assert not faults, faults[0]
                logs.clear()
                store.delete(MEMBERS + last)
            await cluster.settled()
    print(f"{N} records of workers in {time.monotonic() - began_s:.1f} s: {dict(n_lines)}")
    assert n_lines["warning: member's record can't be read, ignored"]


# -- a worker ----------------------------------------------------------------------------------


async def test_a_worker_starts_and_renews_whatever_its_record_says(
    store: MetadataStore, dice: Random
) -> None:
    ends: Counter[str] = Counter()
    began_s = time.monotonic()
    for number in range(N):
        name = f"decode-{number}"
        whole = worker_record(dice, name)
        record = mutant(dice, msgspec.json.encode(whole))
        with noted(f"input {number}: {record[:300]!r}"):
            try:
                await _start_and_renew(store, dice, whole, record)
                ends["joined"] += 1
            except (Superseded, ImplausibleGeneration, MetadataError) as error:
                assert str(error) and len(str(error)) < 2_000
                ends[type(error).__name__] += 1
        store.delete(MEMBERS + name)
        store.delete(GENERATIONS + name)
    print(f"{N} starts in {time.monotonic() - began_s:.1f} s: {dict(ends)}")
    assert ends["joined"]


async def _start_and_renew(
    store: MetadataStore, dice: Random, whole: WorkerInfo, record: bytes
) -> None:
    name = whole.worker_id
    store.put(MEMBERS + name, record, ttl_s=PATIENCE_S)
    if dice.random() < 0.02:
        count = dice.choice((b"7", b"x", b"", b"-3", b"9" * 30, b"1.5", b"\xff", b"007"))
        store.put(GENERATIONS + name, count)
    async with asyncio.timeout(PATIENCE_S):
        generation = await _first_try(next_generation(store, name))
        assert generation >= 1
        info = msgspec.structs.replace(whole, generation=generation)
        membership = Membership(store, info, ttl_s=PATIENCE_S)
        await membership.join()
        assert name in await list_members(store)
        store.put(MEMBERS + name, mutant(dice, record), ttl_s=PATIENCE_S)
        await membership.update(membership.info)
        await membership.leave()


async def _first_try(call: Any) -> int:
    """Await a call that repeats itself while the store fails, for a moment only."""
    try:
        async with asyncio.timeout(0.3):
            result: int = await call
    except TimeoutError:
        raise MetadataError("the counter can't be counted on; it says so and tries again") from None
    return result


# -- transfers ---------------------------------------------------------------------------------


def test_a_broken_record_of_a_segment_fails_its_own_transfers_alone(
    store: MetadataStore, dice: Random, caplog: pytest.LogCaptureFixture
) -> None:
    settings = TransferSettings(connect_timeout_s=0.2, native=False)
    options: Any = {"metadata": store, "backends": ("shm", "tcp"), "settings": settings}
    ends: Counter[str] = Counter()
    began_s = time.monotonic()
    with (
        TransferEngine.open("fuzz-here", **options) as here,
        TransferEngine.open("fuzz-there", **options) as there,
    ):
        local, remote = here.allocate(1000), there.allocate(1000)
        right = there.descriptor
        for number in range(N):
            name = f"fuzz-{number}"
            own = msgspec.structs.replace(right, name=name)
            if dice.random() < 0.3:
                own = SegmentDescriptor(name, 1, "far", {"tcp": Endpoint("127.0.0.1:1")})
            record = mutant(dice, records.encode(own))
            store.put(records.PREFIX + name, record, ttl_s=PATIENCE_S)
            foreign = Region(name, right.generation, remote.region.key, 1000)
            with noted(f"input {number}: {record[:300]!r}"):
                try:
                    piece = Piece(local.region, 0, foreign, 0, 1000)
                    here.submit("read", [piece], 0.5).result(PATIENCE_S)
                    ends["carried"] += 1
                except (TransferError, ValueError) as error:
                    assert str(error), repr(error)
                    ends[type(error).__name__] += 1
                directory = SegmentDirectory(store)
                try:
                    directory.publish(own, PATIENCE_S)
                    assert directory.resolve(name, own.generation, fresh=True)[0] == own
                    ends["published"] += 1
                except TransferError as error:
                    assert str(error)
                    ends[f"publish: {type(error).__name__}"] += 1
            here.release_peer(name)
            store.delete(records.PREFIX + name)
            if number % 20 == 0:
                remote.view[:] = number.to_bytes(4, "little") * 250
                honest = Piece(local.region, 0, remote.region, 0, 1000)
                here.submit("read", [honest], PATIENCE_S).result(PATIENCE_S)
                assert local.view == remote.view
        here.check()
    for log in caplog.records:
        assert log.levelname not in ("ERROR", "CRITICAL"), log.getMessage()
    print(f"{N} records of segments in {time.monotonic() - began_s:.1f} s: {dict(ends)}")
    assert ends["carried"] and ends["Lost"] and ends["published"]


def test_the_lease_of_a_segment_is_renewed_over_a_broken_record(store: MetadataStore) -> None:
    settings = TransferSettings(lease_s=0.3)
    failed: list[Any] = []
    before, threading.excepthook = threading.excepthook, failed.append
    try:
        with TransferEngine.open(
            "fuzz-leased", metadata=store, backends=("tcp",), settings=settings
        ) as engine:
            for broken in (b"", b"{", b"[" * 50_000, b'{"a":' * 50_000, b"\xff"):
                store.put(records.PREFIX + "fuzz-leased", broken)
                deadline = time.monotonic() + PATIENCE_S
                whole = records.encode(engine.descriptor)
                while store.get(records.PREFIX + "fuzz-leased") != whole:
                    assert time.monotonic() < deadline and not failed, failed
                    time.sleep(0.01)
    finally:
        threading.excepthook = before


# -- readers of one record ---------------------------------------------------------------------


def test_a_broken_record_of_an_object_is_refused_in_words(dice: Random) -> None:
    region = Region("there", 1, bytes(16), 100)
    holder = ShardHolder(
        ShardSource("there", 1), True, (BufferPlace(region), None, BufferPlace(region, 50)), b"\x1f"
    )
    whole = ObjectRecord(
        name="o",
        publication="p",
        holders=(holder,),
        sizes=(10, 0, 7),
        shard_bytes=4,
        checksums=(bytes(object_record.CHECKSUM_BYTES),) * 5,
    )
    ends: Counter[str] = Counter()
    for number in range(10 * N):
        record = mutant(dice, object_record.encode(whole))
        with noted(f"input {number}: {record[:300]!r}"):
            try:
                object_record.decode(record).check()
                ends["read"] += 1
            except ValueError as error:
                assert str(error)
                ends["refused"] += 1
    print(f"{10 * N} records of objects: {dict(ends)}")
    assert len(ends) == 2
