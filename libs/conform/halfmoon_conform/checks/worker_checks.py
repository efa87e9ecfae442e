"""Check what every worker does: its record, generations, signals, and the metadata server."""

import asyncio
import secrets
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from halfmoon_conform.check import WORKERS, check
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.peers.caller import Caller
from halfmoon_conform.peers.curve_sockets import open_socket
from halfmoon_conform.peers.wire_maps import encode_map
from halfmoon_conform.subject.subject import member_key
from halfmoon_conform.verdict import CheckFailed, require
from halfmoon_protocol.cluster_keys import cluster_key_id
from halfmoon_protocol.curve_secrets import curve_secrets
from halfmoon_protocol.messages import WorkerInfo

#: Seconds of a record's lease.
_LEASE_S = 10.0
_POLL_S = 0.25


@check(
    "worker.record.schema",
    roles=WORKERS,
    says="A member's record (`MemberRecord` in the schema):",
)
async def _record_schema(context: CheckContext) -> None:
    raw = await asyncio.to_thread(context.subject.store.get, member_key(context.subject.worker_id))
    require(raw is not None, "there is no record")
    try:
        info = msgspec.json.decode(raw or b"", type=WorkerInfo)
    except msgspec.ValidationError as error:
        raise CheckFailed(f"its record is not as the schema says: {error}") from None
    require(info.worker_id == context.subject.worker_id, "its record has another worker_id")
    require(info.role in WORKERS, f"its record has the role {info.role!r}")
    for name in ("commands", "events"):
        endpoint = getattr(info, name)
        require(endpoint.startswith("tcp://"), f"{name} is {endpoint!r}, no ZeroMQ endpoint of TCP")


@check(
    "worker.record.renewed",
    roles=WORKERS,
    says="10 s, renewed three times as often",
)
async def _record_renewed(context: CheckContext) -> None:
    key = member_key(context.subject.worker_id)
    deadline = asyncio.get_running_loop().time() + _LEASE_S + 2
    while asyncio.get_running_loop().time() < deadline:
        found = await asyncio.to_thread(context.subject.store.get, key)
        require(found is not None, "its record ran out while it was up")
        segment = f"halfmoon/segments/{context.subject.worker_id}"
        found = await asyncio.to_thread(context.subject.store.get, segment)
        require(found is not None, "the record of its segment ran out while it was up")
        await asyncio.sleep(_POLL_S)


@check(
    "worker.record.expires",
    roles=WORKERS,
    needs="killable",
    says="A worker that stops removes its records; after a crash they run out. The member's record"
    " goes first. Its exit status is 0 after SIGTERM;",
)
async def _record_expires(context: CheckContext) -> None:
    await context.subject.kill()

    async def gone() -> bool:
        return await context.subject.read_record() is None

    await context.until(gone, "its record ends by its lease", _LEASE_S + 2)


@check(
    "worker.record.segment",
    roles=WORKERS,
    says="A segment's name is its worker's id. Its record has no keys: region keys travel only in"
    " messages, to the services that are meant to use them.",
)
async def _segment_record(context: CheckContext) -> None:
    segment = await context.subject.segment()
    require(segment.get("name") == context.subject.worker_id, f"its name is {segment.get('name')}")
    require(segment.get("generation") == context.subject.generation, "it has another generation")
    require(isinstance(segment.get("host_id"), str), "it has no host_id")
    require("tcp" in segment.get("endpoints", {}), "it has no endpoint for TCP")
    unknown = sorted(set(segment) - {"name", "generation", "host_id", "endpoints"})
    require(not [name for name in unknown if "key" in name], f"it has {unknown}")


@check(
    "worker.generation.counted",
    roles=WORKERS,
    says="A worker counts its generation up when it starts and writes it into its record.",
)
async def _generation_counted(context: CheckContext) -> None:
    key = f"halfmoon/generation/{context.subject.worker_id}"
    raw = await asyncio.to_thread(context.subject.store.get, key)
    require(raw is not None and raw.isdigit(), f"{key} is {raw!r}, not decimal digits")
    require(
        int(raw or 0) == context.subject.generation,
        f"{key} is {raw!r}, and its record says {context.subject.generation}",
    )


@check(
    "worker.generation.higher-after-restart",
    roles=WORKERS,
    needs="killable",
    says="how often this worker was started, decimal digits",
)
async def _generation_higher(context: CheckContext) -> None:
    before = context.subject.generation
    await context.subject.kill()
    await context.subject.restart()
    after = context.subject.generation
    require(after > before, f"its generation was {before}, and is {after} after a restart")
    welcome = await (await context.connect(hello=False)).greet(context.name("c"))
    require(
        welcome["worker"]["generation"] == after,
        "its welcome has another generation than its record",
    )


@check(
    "worker.generation.above-the-segment",
    roles=WORKERS,
    needs="killable",
    says="Then it counts on until it is above the generation of both.",
)
async def _generation_above_segment(context: CheckContext) -> None:
    subject = context.subject
    left = {**await subject.segment(), "generation": subject.generation + 2}
    await subject.kill()
    for key in (member_key(subject.worker_id), f"halfmoon/generation/{subject.worker_id}"):
        await asyncio.to_thread(subject.store.delete, key)
    key = f"halfmoon/segments/{subject.worker_id}"
    await asyncio.to_thread(subject.store.put, key, msgspec.json.encode(left))
    subject.record = {}
    await subject.restart()
    require(
        subject.generation > left["generation"],
        f"its generation is {subject.generation}, its segment's record said {left['generation']}",
    )


@check(
    "worker.generation.older-stops",
    roles=WORKERS,
    needs="killable",
    says="A record of a higher generation wins: the older process finds that out when it renews,"
    " and stops.",
)
async def _older_stops(context: CheckContext) -> None:
    subject = context.subject
    newer = {
        **subject.record,
        "generation": subject.generation + 1,
        "commands": "tcp://127.0.0.1:1",
    }
    key = member_key(subject.worker_id)
    await asyncio.to_thread(subject.store.put, key, msgspec.json.encode(newer))

    async def stopped() -> bool:
        return subject.process is not None and not subject.process.running

    await context.until(stopped, "it stops for a record of a higher generation", _LEASE_S + 20)
    left = await asyncio.to_thread(subject.store.get, key)
    require(left == msgspec.json.encode(newer), "it changed the record of the higher generation")


@check(
    "worker.metadata.away",
    roles=WORKERS,
    needs="alone",
    says="10 s, renewed three times as often",
)
async def _metadata_away(context: CheckContext) -> None:
    server = context.metadata_server
    caller = await context.connect()
    server.go_away(forget=True)
    await asyncio.sleep(_LEASE_S / 3 + 1)
    await caller.settle()
    server.come_back()

    async def back() -> bool:
        key = f"halfmoon/segments/{context.subject.worker_id}"
        segment = await asyncio.to_thread(context.subject.store.get, key)
        return segment is not None and await context.subject.read_record() is not None

    await context.until(back, "its records are there again", _LEASE_S)
    await caller.settle()


@check(
    "worker.stop.record-goes",
    roles=WORKERS,
    needs="killable",
    says="A worker that stops removes its records; after a crash they run out.",
)
async def _stop(context: CheckContext) -> None:
    subject = context.subject
    await context.connect()
    await subject.ask_to_stop()

    async def stopped() -> bool:
        return subject.process is not None and not subject.process.running

    await context.until(stopped, "an idle worker ends when it is asked to", 40)
    require(await subject.read_record() is None, "it ended and left its record to run out")
    segment = f"halfmoon/segments/{subject.worker_id}"
    left = await asyncio.to_thread(subject.store.get, segment)
    require(left is None, "it ended and left the record of its segment to run out")
    status = subject.process.exit_status if subject.process is not None else 0
    require(status == 0, f"it ended with status {status}, asked to by SIGTERM")


@check(
    "worker.garbage.no-zeromq",
    roles=WORKERS,
    says="A message that is duplicate, late, foreign or absurd costs an answer or a log line. It"
    " never costs a task, a batch or a process, and never another connection's request.",
)
async def _no_zeromq(context: CheckContext) -> None:
    caller = await context.connect()
    for name in ("commands", "events"):
        host, _, port = context.subject.record[name].removeprefix("tcp://").rpartition(":")
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, secrets.token_bytes(4096), b""):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.write(said)
            writer.close()
    await caller.settle()


@check(
    "worker.callers.slow-reader",
    roles=WORKERS,
    says="never another connection's request",
)
async def _slow_reader(context: CheckContext) -> None:
    slow = open_socket(context.sockets, zmq.DEALER, queue=1)
    if context.subject.cluster_key:
        _as_caller(slow, context.subject.cluster_key, context.subject.cluster_key)
    slow.connect(context.subject.record["commands"])
    hello = encode_map({"type": "hello", "conductor_id": context.name("slow"), "session": 1})
    try:
        for _ in range(4000):
            await asyncio.wait_for(slow.send(hello), 5)
    except TimeoutError:
        pass  # its queue is full, as a slow reader's may be
    try:
        caller = await context.connect()
        for _ in range(3):
            await caller.settle()
    finally:
        slow.close(linger=0)


@check(
    "worker.curve.key-id",
    roles=WORKERS,
    keyed=True,
    says="A worker's record and the addresses of workers in messages name that key in `key_id`: the"
    " first 16 hexadecimal digits of the HMAC-SHA-256 of `halfmoon key id 1`, under the cluster key"
    " in UTF-8.",
)
async def _key_id(context: CheckContext) -> None:
    named = context.subject.record.get("key_id", "")
    wanted = cluster_key_id(context.subject.cluster_key)
    require(named == wanted, f"its record has the key_id {named!r}, not {wanted!r}")


@check(
    "worker.curve.no-key-id-without-key",
    roles=WORKERS,
    keyed=False,
    says="it is left out without one",
)
async def _no_key_id(context: CheckContext) -> None:
    named = context.subject.record.get("key_id", "")
    require(not named, f"its record has the key_id {named!r}, and there is no key")


@check(
    "worker.curve.plain-callers",
    roles=WORKERS,
    keyed=True,
    says="There is no fallback: sides of which only one has a key do not connect.",
)
async def _plain_caller(context: CheckContext) -> None:
    socket = open_socket(context.sockets, zmq.DEALER)
    await _require_unheard(context, socket)


@check(
    "worker.curve.other-callers",
    roles=WORKERS,
    keyed=True,
    says="A port sets the ports' secret key, and lets in callers with the callers' public key only"
    " ([ZAP](https://rfc.zeromq.org/spec/27/)).",
)
async def _other_caller(context: CheckContext) -> None:
    socket = open_socket(context.sockets, zmq.DEALER)
    _as_caller(socket, context.subject.cluster_key, "another key of 32 characters ....")
    await _require_unheard(context, socket)


@check(
    "worker.curve.events-encrypted",
    roles=WORKERS,
    keyed=True,
    says="With a cluster key, all ROUTER, DEALER, PUB and SUB sockets speak"
    " [CURVE](https://rfc.zeromq.org/spec/26/), which is part of libzmq.",
)
async def _events_encrypted(context: CheckContext) -> None:
    """Subscribe in the clear, and see that nothing comes while an encrypted listener hears."""
    caller = await context.connect()
    if context.subject.record["role"] == "kvstore":
        await put_one(context, caller)
    socket = open_socket(context.sockets, zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(context.subject.record["events"])
    try:
        listener = await context.listen()
        await listener.wait_for(lambda: len(listener.loads) > 2, "load")
        heard = await socket.poll(0)
    finally:
        socket.close(linger=0)
    require(not heard, "published to a subscriber without the cluster key")


async def put_one(context: CheckContext, caller: Caller) -> None:
    """Put one block, so that the kvstore has a layout and publishes its load."""
    chain = context.blocks(1)
    ticket = context.name("put")
    message: dict[str, Any] = {
        "type": "reserve_blocks",
        "ticket": ticket,
        "layout": chain.layout,
        "hashes": chain.hashes,
        "parent": None,
        "token_ids": chain.token_ids,
    }
    await caller.send(message)
    await caller.expect({"type": "blocks_reserved", "ticket": ticket})
    await caller.send({"type": "revoke_blocks", "ticket": ticket})


def _as_caller(socket: "zmq.Socket[Any]", port_key: str, caller_key: str) -> None:
    port = z85.encode(curve_secrets(port_key).port)
    caller = z85.encode(curve_secrets(caller_key).caller)
    socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(port))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(caller))
    socket.setsockopt(zmq.CURVE_SECRETKEY, caller)


async def _require_unheard(context: CheckContext, socket: "zmq.asyncio.Socket") -> None:
    """See that a hello of this socket is not answered, while another caller's is."""
    socket.connect(context.subject.record["commands"])
    hello = {"type": "hello", "conductor_id": context.name("stranger"), "session": 1}
    try:
        await socket.send(encode_map(hello))
        for _ in range(3):
            await (await context.connect()).settle()
        heard = await socket.poll(500)
    finally:
        socket.close(linger=0)
    require(not heard, "answered a caller that does not have the cluster key")
