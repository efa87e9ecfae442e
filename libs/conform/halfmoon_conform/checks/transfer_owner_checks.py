"""Check a worker as the owner of regions: bounds, keys, limits, order, cuts and proofs."""

import asyncio
import contextlib
import secrets
from typing import Any

import msgspec

from halfmoon_conform.check import ServiceRole, check
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.peers import transfer_frames as frames
from halfmoon_conform.peers.transfer_connection import (
    HungUp,
    RepliedInstead,
    TransferConnection,
)
from halfmoon_conform.peers.transfer_frames import RequestHead, SliceEntry
from halfmoon_conform.verdict import CheckFailed, CheckSkipped, require
from halfmoon_conform.writable_place import WritablePlace, open_place

_OWNERS: tuple[ServiceRole, ...] = ("kvstore", "decode")
_CHECKED = "Over TCP the owner checks key, generation and bounds on every access."
_LIMITS = (
    "Limits: 1 to 1,024 slices of 1 byte to 16 MiB in a request, 64 MiB in all, 4,096 bytes of"
    " hello or proof."
)
_UNREADABLE = (
    "255 in a reply: the request could not be read. Then n is 0, the u32 after n counts bytes of"
    " UTF-8, 512 at the most, that follow the checksum and say why, and the connection is closed"
)
_U64 = 2**64 - 1
#: NO_ROOM, and no notification may wait: status and detail.
_TAKES_NONE = (7, 0)
#: Refusals of a key that is a grant's, or of bounds.
_OUTSIDE = (frames.OUT_OF_BOUNDS, frames.NOT_GRANTED)


async def _opened(context: CheckContext) -> tuple[WritablePlace, TransferConnection]:
    place = await open_place(context)
    return place, await context.dial(place.region)


def _write(place: WritablePlace, number: int, *parts: tuple[int, bytes]) -> bytes:
    """Return a whole request that writes these parts, each behind the place's start."""
    key = bytes(place.region["key"])
    entries = [
        SliceEntry(key, place.offset + offset, len(data), frames.checksum(data))
        for offset, data in parts
    ]
    head = RequestHead(frames.WRITE, number, place.region["generation"], entries).encode()
    return head + b"".join(data for _, data in parts)


@check(
    "transfer.owner.round-trip", roles=_OWNERS, says="A process with the key may read and write it."
)
async def _round_trip(context: CheckContext) -> None:
    place, connection = await _opened(context)
    data = secrets.token_bytes(place.length)
    third = place.length // 3
    parts = [(place.offset + i, data[i : i + third]) for i in range(0, place.length, third)]
    statuses = await connection.write_bytes(place.region, parts)
    require(not any(statuses), f"writes of parts of a place have the statuses {statuses}")
    found = await _read_back(context, place, connection)
    require(found is None or found == data, "read other bytes than were written")


async def _read_back(
    context: CheckContext, place: WritablePlace, connection: TransferConnection
) -> bytes | None:
    """Read a place; None where its key is for writes alone."""
    ((status, data),) = await connection.read_bytes(place.region, [(place.offset, place.length)])
    if status == frames.NOT_GRANTED:
        return None
    require(status == frames.OK, f"a read of a place has the status {status}")
    return data


@check(
    "transfer.owner.hello",
    roles=_OWNERS,
    says="Unknown fields are ignored, missing ones are empty.",
)
async def _hello(context: CheckContext) -> None:
    place, connection = await _opened(context)
    owner = connection.owner
    require(owner.get("segment") == place.region["segment"], f"its hello is of {owner!r:.200}")
    require(owner.get("generation") == place.region["generation"], f"its hello is {owner!r:.200}")
    if context.subject.cluster_key:
        return
    shortest = await context.dial_plain()
    asked = {"segment": owner["segment"], "generation": owner["generation"]}
    await shortest.stream.write(frames.encode_start(frames.HELLO, msgspec.msgpack.encode(asked)))
    await shortest.read_start(frames.HELLO)
    statuses = await shortest.write_bytes(place.region, [(place.offset, b"x")])
    require(not any(statuses), "a connection with the shortest hello can't write")


@check(
    "transfer.owner.hello-for-another",
    roles=_OWNERS,
    says='{segment, generation, refused, nonce, share}: who it is, and why not ("" is yes)',
)
async def _hello_for_another(context: CheckContext) -> None:
    segment = await context.subject.segment()
    for name, generation in (
        ("conform-nobody", segment["generation"]),
        (segment["name"], segment["generation"] + 1),
    ):
        connection = await context.dial_plain()
        try:
            await connection.greet(name, generation, cluster_key=context.subject.cluster_key)
        except CheckFailed as refused:
            require(str(refused).startswith("refused the hello"), str(refused))
        else:
            raise CheckFailed(f"answered a hello for {name}, generation {generation}, by yes")


def _hello_with(context: CheckContext, **fields: Any) -> bytes:
    """Encode a hello to the subject with one field that can't be read."""
    subject = context.subject
    hello = {"segment": subject.worker_id, "generation": subject.generation, **fields}
    return msgspec.msgpack.encode(hello)


@check("transfer.owner.hello-malformed", roles=_OWNERS, says=_LIMITS)
async def _hello_malformed(context: CheckContext) -> None:
    good = msgspec.msgpack.encode({"segment": context.subject.worker_id, "generation": 1})
    for said in (
        frames.encode_start(frames.HELLO, good, version=9),
        frames.encode_start(b"HMTX", good),
        frames.encode_start(frames.HELLO, b"\xc1" * 20),
        frames.encode_start(frames.HELLO, msgspec.msgpack.encode([1, 2, 3])),
        frames.encode_start(frames.HELLO, good + bytes(4097 - len(good))),
        frames.encode_start(frames.HELLO, _hello_with(context, nonce=bytes(31))),
        frames.encode_start(frames.HELLO, _hello_with(context, session=bytes(15))),
        frames.encode_start(frames.HELLO, _hello_with(context, origin=None)),
        b"GET / HTTP/1.1\r\n\r\n",
        secrets.token_bytes(64),
    ):
        connection = await context.dial_plain()
        await connection.stream.write(said)
        try:
            answered = await connection.read_start(frames.HELLO)
        except (CheckFailed, HungUp):
            continue
        refused = msgspec.msgpack.decode(answered).get("refused")
        require(refused, f"answered {said[:20]!r} by a hello without a refusal")
    await _opened(context)


@check("transfer.owner.bounds", roles=_OWNERS, says=_CHECKED)
async def _bounds(context: CheckContext) -> None:
    place, connection = await _opened(context)
    length = place.region["length"]
    for offset, size in ((length, 1), (length - 1, 2), (2**40, 16), (length, 4096)):
        (status,) = await connection.write_bytes(place.region, [(offset, bytes(size))])
        require(status in _OUTSIDE, f"a write of {size} bytes at {offset}: status {status}")
        ((status, _),) = await connection.read_bytes(place.region, [(offset, size)])
        require(status in _OUTSIDE, f"a read of {size} bytes at {offset}: status {status}")


@check("transfer.owner.bounds-overflow", roles=_OWNERS, says=_CHECKED)
async def _overflow(context: CheckContext) -> None:
    place, connection = await _opened(context)
    for offset, size in ((_U64, 1), (_U64, 2), (_U64 - 15, 16), (_U64 - 14, 16), (2**63, 8)):
        (status,) = await connection.write_bytes(place.region, [(offset, bytes(size))])
        require(status in _OUTSIDE, f"a write of {size} bytes at {offset}: status {status}")
        ((status, _),) = await connection.read_bytes(place.region, [(offset, size)])
        require(status in _OUTSIDE, f"a read of {size} bytes at {offset}: status {status}")


@check("transfer.owner.unknown-key", roles=_OWNERS, says=_CHECKED)
async def _unknown_key(context: CheckContext) -> None:
    place, connection = await _opened(context)
    for key in (secrets.token_bytes(16), bytes(16)):
        region = {**place.region, "key": key}
        (status,) = await connection.write_bytes(region, [(place.offset, b"x")])
        require(status == frames.UNKNOWN_KEY, f"a write by an unknown key: status {status}")
        ((status, _),) = await connection.read_bytes(region, [(place.offset, 1)])
        require(status == frames.UNKNOWN_KEY, f"a read by an unknown key: status {status}")


@check(
    "transfer.owner.order-of-refusals",
    roles=_OWNERS,
    says="Where several of these apply, the first of 3, 2, 1, 4 and 11 counts.",
)
async def _order_of_refusals(context: CheckContext) -> None:
    place, connection = await _opened(context)
    behind = (place.region["length"], b"x")
    unknown = {**place.region, "key": secrets.token_bytes(16)}
    (status,) = await connection.write_bytes(unknown, [behind])
    require(status == frames.UNKNOWN_KEY, f"an unknown key and an offset behind: status {status}")
    later = {**unknown, "generation": unknown["generation"] + 1}
    (status,) = await connection.write_bytes(later, [behind])
    require(
        status == frames.OTHER_GENERATION,
        f"another generation, an unknown key and an offset behind: status {status}",
    )


@check("transfer.owner.other-generation", roles=_OWNERS, says=_CHECKED)
async def _other_generation(context: CheckContext) -> None:
    place, connection = await _opened(context)
    own = place.region["generation"]
    for generation in (own + 1, own - 1, 2**40):
        entry = SliceEntry(bytes(place.region["key"]), place.offset, 1, frames.checksum(b"x"))
        await connection.send(frames.WRITE, max(generation, 0), [entry], b"x")
        ((status, detail),) = (await connection.reply()).entries
        require(
            (status, detail) == (frames.OTHER_GENERATION, own),
            f"a write of generation {generation}: {(status, detail)}, and it is {own}",
        )


@check(
    "transfer.owner.wrong-checksum",
    roles=_OWNERS,
    says="With another checksum it is answered 6, and the initiator sends it again: until then the"
    " place may hold anything.",
)
async def _wrong_checksum(context: CheckContext) -> None:
    place, connection = await _opened(context)
    entry = SliceEntry(bytes(place.region["key"]), place.offset, 8, frames.checksum(b"other..."))
    await connection.send(frames.WRITE, place.region["generation"], [entry], b"damaged.")
    ((status, _),) = (await connection.reply()).entries
    require(status == frames.CHECKSUM_MISMATCH, f"bytes with another checksum: status {status}")
    statuses = await connection.write_bytes(place.region, [(place.offset, b"mended..")])
    require(not any(statuses), f"the same slice, sent again: status {statuses}")


@check(
    "transfer.owner.good-beside-bad",
    roles=_OWNERS,
    says="n entries of 16 bytes: u8 status | 7 zero bytes | u64 detail",
)
async def _good_beside_bad(context: CheckContext) -> None:
    """Write good and refused slices in one request: each has its status, and the stream goes on."""
    place, connection = await _opened(context)
    end = place.region["length"]
    parts = [
        (place.offset, b"good"),
        (end, bytes(100_000)),
        (place.offset + 4, b"fine"),
        (_U64, b"bad"),
    ]
    statuses = await connection.write_bytes(place.region, parts)
    good = [status == frames.OK for status in statuses]
    require(good == [True, False, True, False], f"statuses {statuses} of good, bad, good, bad")
    found = await _read_back(context, place, connection)
    require(found is None or found[:8] == b"goodfine", "good slices were not written")


@check(
    "transfer.owner.pipelining",
    roles=_OWNERS,
    says="from then on requests are answered in order; further requests may be sent before the"
    " first reply.",
)
async def _pipelining(context: CheckContext) -> None:
    place, connection = await _opened(context)
    n_requests = 24
    data = secrets.token_bytes(n_requests)
    sent = b"".join(_write(place, 100 + i, (i, data[i : i + 1])) for i in range(n_requests))
    await connection.stream.write(sent)
    for i in range(n_requests):
        reply = await connection.reply()
        require(
            (reply.op, reply.number, reply.entries) == (frames.WRITE, 100 + i, [(0, 0)]),
            f"reply {i} is {reply}, to request {100 + i}",
        )


@check(
    "transfer.owner.requests-in-pieces",
    roles=_OWNERS,
    says="op 2 (write): the slices' bytes, one after the other",
)
async def _in_pieces(context: CheckContext) -> None:
    """Send a request byte by byte: a frame may end anywhere in what arrives."""
    place, connection = await _opened(context)
    for byte in _write(place, 1, (0, b"slow"), (4, b"ly")):
        await connection.stream.write(bytes([byte]))
    reply = await connection.reply()
    require(reply.entries == [(0, 0), (0, 0)], f"a request that came byte by byte: {reply}")


@check("transfer.owner.limits", roles=_OWNERS, says=_LIMITS)
async def _limits(context: CheckContext) -> None:
    place, _ = await _opened(context)
    key = bytes(place.region["key"])
    one = SliceEntry(key, place.offset, 1, frames.checksum(b"x"))
    large = SliceEntry(key, place.offset, frames.MAX_SLICE_BYTES)
    for what, entries in (
        ("no slice", []),
        ("1,025 slices", [one] * 1025),
        ("a slice of 0 bytes", [SliceEntry(key, place.offset, 0)]),
        ("a slice of more than 16 MiB", [SliceEntry(key, 0, frames.MAX_SLICE_BYTES + 1)]),
        ("slices of more than 64 MiB", [large] * 5),
        ("a slice of 4 GiB", [SliceEntry(key, 0, 2**32 - 1)]),
    ):
        connection = await context.dial(place.region)
        await connection.send(frames.READ, place.region["generation"], entries)
        text = await connection.expect_end()
        require(text, f"hung up on a request of {what}, and did not say why")
    place, _ = await _opened(context)  # the first one may have run out on a busy machine
    connection = await context.dial(place.region)
    statuses = await connection.write_bytes(place.region, [(place.offset, b"x")] * 1024)
    require(
        not any(statuses),
        f"a request of 1,024 slices is within the limits, and was answered with {set(statuses)}",
    )


@check("transfer.owner.unreadable", roles=_OWNERS, says=_UNREADABLE)
async def _unreadable(context: CheckContext) -> None:
    place, _ = await _opened(context)
    generation = place.region["generation"]
    entry = SliceEntry(bytes(place.region["key"]), place.offset, 1, frames.checksum(b"x"))
    for what, said in (
        ("another checksum", RequestHead(1, 0, generation, [entry]).encode(damage=True)),
        ("another version", RequestHead(1, 0, generation, [entry], version=2).encode()),
        ("another beginning", RequestHead(1, 0, generation, [entry], magic=b"HMTX").encode()),
        ("op 7", RequestHead(7, 0, generation, [entry]).encode()),
        ("unknown flags", RequestHead(1, 0, generation, [entry], flags=0x80).encode()),
        ("random bytes", secrets.token_bytes(64)),
    ):
        connection = await context.dial(place.region)
        await connection.stream.write(said)
        text = await connection.expect_end()
        require(text, f"hung up on a request with {what}, and did not say why")


@check(
    "transfer.owner.cut-in-mid-write",
    roles=_OWNERS,
    says="A hello that names given-up connections in `over` gets its confirmation only when the"
    " owner has cut those off and reads from them no more",
)
async def _cut_in_mid_write(context: CheckContext) -> None:
    place = await open_place(context)
    session = secrets.token_bytes(16)
    segment = await context.subject.segment()

    async def dial(number: int, over: list[int]) -> TransferConnection:
        opened = await TransferConnection.open(
            segment["endpoints"]["tcp"]["address"],
            place.region["segment"],
            place.region["generation"],
            cluster_key=context.subject.cluster_key,
            hello={"session": session, "number": number, "over": over},
        )
        context.on_end(opened.close)
        return opened

    first = await dial(0, [])
    whole = _write(place, 0, (0, b"A" * place.length))
    await first.stream.write(whole[: len(whole) - place.length // 2])
    second = await dial(1, [0])
    # The rest of the write must not land behind what comes now.
    with contextlib.suppress(ConnectionError):
        await first.stream.write(whole[len(whole) - place.length // 2 :])
    statuses = await second.write_bytes(place.region, [(place.offset, b"B" * place.length)])
    require(not any(statuses), f"a write after a cut one: status {statuses}")
    try:
        reply = await first.reply()
    except HungUp:
        pass
    else:
        require(reply.op == frames.FAILED, f"answered a connection that is over by {reply}")
    found = await _read_back(context, place, second)
    require(found is None or found == b"B" * place.length, "bytes of the cut write are there")


@check(
    "transfer.owner.key-ends-in-mid-write",
    roles=_OWNERS,
    needs="alone",
    says="None of its bytes may land once the place is used for anything else.",
)
async def _key_ends_in_mid_write(context: CheckContext) -> None:
    place, other = await open_place(context), await open_place(context)
    if place.region["key"] == other.region["key"]:
        raise CheckSkipped("its places have no keys of their own")
    connection = await context.dial(place.region)
    whole = _write(place, 0, (0, b"A" * place.length))
    await connection.stream.write(whole[: len(whole) - place.length // 2])
    await place.end()
    # An owner may keep the place until the write has ended, and take all of it.
    later = [await open_place(context) for _ in range(4)]
    with contextlib.suppress(ConnectionError):
        await connection.stream.write(whole[len(whole) - place.length // 2 :])
    try:
        reply = await connection.reply()
    except HungUp:
        return
    require(
        reply.op == frames.FAILED
        or any(status for status, _ in reply.entries)
        or all(each.offset != place.offset for each in later),
        "took the rest of a write to a place that it had given to another request",
    )


@check(
    "transfer.owner.stalled-peer",
    roles=_OWNERS,
    says="never another connection's request",
)
async def _stalled_peer(context: CheckContext) -> None:
    place, stalled = await _opened(context)
    whole = _write(place, 0, (0, b"stalled"))
    await stalled.stream.write(whole[:-3])
    others = await asyncio.gather(*(context.dial(place.region) for _ in range(8)))
    for other in others:
        statuses = await other.write_bytes(place.region, [(place.offset + 8, b"quick")])
        require(not any(statuses), f"a write beside a stalled one: {statuses}")


@check(
    "transfer.owner.notification",
    roles=_OWNERS,
    says="A notification that comes twice, by its id, is answered 0 and queued once.",
)
async def _notification(context: CheckContext) -> None:
    place, connection = await _opened(context)
    body = msgspec.msgpack.encode(["conform", b"hello"])
    entry = SliceEntry(secrets.token_bytes(16), 0, len(body), frames.checksum(body))
    for _ in range(2):
        await connection.send(frames.NOTIFY, place.region["generation"], [entry], body)
        reply = await connection.reply()
        if (reply.op, reply.entries) == (frames.NOTIFY, [_TAKES_NONE]):
            raise CheckSkipped("this owner takes no notifications")
        require((reply.op, reply.entries) == (frames.NOTIFY, [(0, 0)]), f"a notification: {reply}")


@check(
    "transfer.owner.notification-generation",
    roles=_OWNERS,
    says="The request's generation counts as any other's",
)
async def _notification_of_another_generation(context: CheckContext) -> None:
    place, connection = await _opened(context)
    own = place.region["generation"]
    body = msgspec.msgpack.encode(["conform", b"late"])
    entry = SliceEntry(secrets.token_bytes(16), 0, len(body), frames.checksum(body))
    await connection.send(frames.NOTIFY, own + 1, [entry], body)
    (answered,) = (await connection.reply()).entries
    if answered == _TAKES_NONE:
        raise CheckSkipped("this owner takes no notifications")
    require(
        answered == (frames.OTHER_GENERATION, own),
        f"a notification of generation {own + 1}: {answered}, and it is {own}",
    )


# -- with a cluster key ----------------------------------------------------------------------------


@check(
    "transfer.key.none",
    roles=_OWNERS,
    keyed=True,
    says="A side that has a key refuses one that has none, before any request; a side that proves"
    " nothing gets no proof.",
)
async def _no_key(context: CheckContext) -> None:
    segment = await context.subject.segment()
    connection = await context.dial_plain()
    await _require_refused(connection.greet(segment["name"], segment["generation"]))
    # A nonce without a proof: a request right behind it must not be read.
    place = await open_place(context)
    silent = await context.dial_plain()
    asked = {
        "segment": segment["name"],
        "generation": segment["generation"],
        "nonce": secrets.token_bytes(32),
    }
    await silent.stream.write(frames.encode_start(frames.HELLO, msgspec.msgpack.encode(asked)))
    await silent.stream.write(_write(place, 0, (0, b"x")))
    with contextlib.suppress(HungUp, CheckFailed):
        await silent.read_start(frames.HELLO)
        reply = await silent.reply()
        require(reply.op == frames.FAILED, f"read a request without a proof: {reply}")


@check(
    "transfer.key.wrong",
    roles=_OWNERS,
    keyed=True,
    says="With a cluster key, both hellos have 32 random bytes as their `nonce`; it is empty"
    " without. After the owner's hello the initiator sends a proof, and the owner answers with"
    " its own; only then are requests read.",
)
async def _wrong_key(context: CheckContext) -> None:
    segment = await context.subject.segment()
    for proof in (bytes(32), secrets.token_bytes(32), b""):
        connection = await context.dial_plain()
        await _require_refused(
            connection.greet(
                segment["name"],
                segment["generation"],
                cluster_key=context.subject.cluster_key,
                proof=proof,
            )
        )
    connection = await context.dial_plain()
    await _require_refused(
        connection.greet(
            segment["name"], segment["generation"], cluster_key="another key of 32 characters ...."
        )
    )


@check(
    "transfer.key.refusal-says-why",
    roles=_OWNERS,
    keyed=True,
    says="A wrong proof is answered by an empty `proof` and the reason in `refused`.",
)
async def _refusal_says_why(context: CheckContext) -> None:
    answered = await _answer_to_proof(context, proof=secrets.token_bytes(32))
    require(answered is not None, "answered a wrong proof by a reply")
    require(answered.get("refused"), "did not say why it refuses a wrong proof")
    require(not answered.get("proof"), "proved its key to a peer without the right one")


@check(
    "transfer.key.low-order-share",
    roles=_OWNERS,
    keyed=True,
    says="So is a share that gives no secret, such as a point of low order; a reply with op 255"
    " will do.",
)
async def _low_order_share(context: CheckContext) -> None:
    for share in (bytes(32), b"\x01" + bytes(31)):
        answered = await _answer_to_proof(context, hello={"share": share})
        require(
            answered is None or (answered.get("refused") and not answered.get("proof")),
            f"took the share {share.hex()}, which gives no secret",
        )


async def _answer_to_proof(context: CheckContext, **greeting: Any) -> Any:
    """Return the owner's answer to our proof; None: a reply came in its place."""
    segment = await context.subject.segment()
    connection = await context.dial_plain()
    key = context.subject.cluster_key
    try:
        await connection.greet(segment["name"], segment["generation"], cluster_key=key, **greeting)
    except RepliedInstead:
        return None
    except HungUp:
        raise CheckFailed("hung up on it, and did not say why") from None
    except CheckFailed:
        if not connection.proof_answer:
            raise
    return connection.proof_answer


@check(
    "transfer.key.nonces-differ",
    roles=_OWNERS,
    keyed=True,
    says="With a cluster key, both hellos have 32 random bytes as their `nonce`",
)
async def _nonces(context: CheckContext) -> None:
    nonces, shares = set(), set()
    for _ in range(3):
        _, connection = await _opened(context)
        nonces.add(connection.owner.get("nonce", b""))
        shares.add(connection.owner.get("share", b""))
    require({len(nonce) for nonce in nonces} == {32}, "a nonce of another length than 32 bytes")
    require(len(nonces) == 3, "the owner's nonces repeat")
    require(shares == {b""} or len(shares) == 3, "the owner's shares repeat")


@check(
    "transfer.key.one-side-encrypts",
    roles=_OWNERS,
    keyed=True,
    says="Where both have a key and only one has a share, both refuse before any request.",
)
async def _one_side_encrypts(context: CheckContext) -> None:
    segment = await context.subject.segment()
    connection = await context.dial_plain()
    await _require_refused(
        connection.greet(
            segment["name"],
            segment["generation"],
            cluster_key=context.subject.cluster_key,
            encrypt=False,
        )
    )


@check(
    "transfer.key.damaged-record",
    roles=_OWNERS,
    keyed=True,
    says="A record that does not open ends the connection, and no byte of it is used. The owner"
    " says so in a reply with op 255.",
)
async def _damaged_record(context: CheckContext) -> None:
    place, connection = await _opened(context)
    require(connection.stream.encrypted, "the connection is not encrypted")
    request = _write(place, 0, (0, b"x"))
    sealed = bytearray(connection.stream.seal(request))
    sealed[10] ^= 1
    await connection.stream.write_raw(bytes(sealed))
    text = await connection.expect_end()
    require(text, "hung up on a record that does not open, and did not say why")


async def _require_refused(greeting: Any) -> None:
    try:
        await greeting
    except HungUp:
        return
    except CheckFailed as refused:
        require("refused" in str(refused), str(refused))
        return
    raise CheckFailed("let in a peer that it should refuse")
