"""Check how a prefill ends: cancels, expiry, and writes that fail."""

import asyncio
from typing import Any

from halfmoon_conform.check import ServiceRole, check
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.peers import transfer_frames as frames
from halfmoon_conform.played_kvstore import PlayedKvstore
from halfmoon_conform.prefill_client import PlayedLanding, PrefillClient
from halfmoon_conform.verdict import require

_PREFILL: tuple[ServiceRole, ...] = ("prefill",)
_WRITES_NO_MORE = (
    "After `prefill_done`, `prefill_failed` or `prefill_stopped` the prefill worker writes no more."
)
_STARTS_NO_WRITE = "After that time the prefill worker starts no more writes"


# -- cancels and time ------------------------------------------------------------------------------


async def _cancelled(client: PrefillClient, request_id: str, landing: PlayedLanding) -> None:
    """Cancel, wait for the one answer, and see that no write comes after it."""
    await client.caller.send({"type": "cancel", "request_id": request_id})
    ended = await client.end_of(request_id)
    if ended["type"] == "prefill_done":  # it was done before the cancel came
        ended = await client.end_of(request_id)
    require(ended["type"] == "prefill_stopped", f"answered a cancel by {ended}")
    require(await client.quiet(landing) == 0, "wrote after prefill_stopped")
    client.require_untouched(landing)
    late = [m for m in client.caller.inbox if m.get("request_id") == request_id]
    require(not late, f"{late[:1]} after prefill_stopped")


@check("prefill.cancel.at-once", roles=_PREFILL, says=_WRITES_NO_MORE)
async def _cancel_at_once(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    landing = client.landing(4 * client.block_size)
    request_id = await client.start(client.tokens(4 * client.block_size), landing)
    await _cancelled(client, request_id, landing)


@check("prefill.cancel.while-it-writes", roles=_PREFILL, says=_WRITES_NO_MORE)
async def _cancel_writing(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    landing = client.landing(4 * client.block_size)
    client.owner.may_reply.clear()
    request_id = await client.start(client.tokens(4 * client.block_size), landing)

    async def written() -> bool:
        return bool(client.owner.writes(landing.region["key"]))

    await context.until(written, "a write to the landing")
    await client.caller.send({"type": "cancel", "request_id": request_id})
    await client.caller.settle()
    client.owner.may_reply.set()
    ended = await client.end_of(request_id)
    require(ended["type"] == "prefill_stopped", f"answered a cancel by {ended}")
    require(await client.quiet(landing) == 0, "wrote after prefill_stopped")


@check("prefill.cancel.while-it-fetches", roles=_PREFILL, says=_WRITES_NO_MORE)
async def _cancel_fetching(context: CheckContext) -> None:
    client, kvstore = await PrefillClient.open(context), await PlayedKvstore.open(context)
    tokens = client.tokens(3 * client.block_size)
    await client.fill(kvstore, tokens)
    kvstore.owner.may_serve.clear()
    landing = client.landing(len(tokens))
    cached = {"kvstore": kvstore.port.address, "n_blocks": 2}
    request_id = await client.start(tokens, landing, cached=cached)
    await kvstore.port.expect({"type": "lease_blocks", "hashes": {"$length": {"$at_least": 1}}})
    await _cancelled(client, request_id, landing)
    kvstore.owner.may_serve.set()


@check(
    "prefill.cancel.while-it-puts",
    roles=_PREFILL,
    says="A client that gave up a write over TCP first says hello with that connection in `over`."
    " When that is confirmed, it sends `revoke_blocks`. Without an answer it sends none, and the"
    " reservation runs out.",
)
async def _cancel_putting(context: CheckContext) -> None:
    """Cancel between the writes to a kvstore and their replies: the put is not committed."""
    client, kvstore = await PrefillClient.open(context), await PlayedKvstore.open(context)
    kvstore.reservation_s = 4.0
    for owner in (client.owner, kvstore.owner):
        owner.may_reply.clear()
    tokens = client.tokens(3 * client.block_size)
    landing = client.landing(len(tokens))
    request_id = await client.start(tokens, landing, store_in=kvstore.port.address)

    async def written() -> bool:
        return bool(kvstore.owner.writes(kvstore.region["key"]))

    await context.until(written, "a write to the kvstore")
    await client.caller.send({"type": "cancel", "request_id": request_id})
    await client.caller.settle()
    client.owner.may_reply.set()
    ended = await client.end_of(request_id)
    require(ended["type"] == "prefill_stopped", f"answered a cancel by {ended}")
    if await _is_revoked(context, kvstore):
        over = [number for hello in kvstore.owner.hellos for number in hello.get("over", ())]
        require(over, "revoked a put, and no hello before names the connection of its write")
    require(
        not kvstore.port.has_received({"type": "commit_blocks"}),
        "committed a put whose writes were not answered",
    )
    n_writes = len(kvstore.owner.writes(kvstore.region["key"]))
    kvstore.owner.may_reply.set()
    require(await client.quiet(landing) == 0, "wrote after prefill_stopped")
    late = len(kvstore.owner.writes(kvstore.region["key"])) - n_writes
    require(late == 0, "wrote to the kvstore after its put was over")


async def _is_revoked(context: CheckContext, kvstore: PlayedKvstore) -> bool:
    """Wait for the end of a put: return True if it is revoked, False if it runs out."""
    clock = asyncio.get_running_loop().time
    renewals = {"n": 0, "last_s": clock()}

    def is_revoked() -> bool:
        return kvstore.port.has_received({"type": "revoke_blocks"})

    async def is_over() -> bool:
        n = sum(message["type"] == "renew_lease" for message in kvstore.port.received)
        if n != renewals["n"]:
            renewals.update(n=n, last_s=clock())
        return is_revoked() or clock() > renewals["last_s"] + kvstore.reservation_s

    await context.until(is_over, "its put is revoked, or is renewed no more", 40)
    return is_revoked()


@check(
    "prefill.cancel.unknown", roles=_PREFILL, says="After `cancel`: nothing more will be written."
)
async def _cancel_unknown(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    request_id = context.name("never")
    await client.caller.send({"type": "cancel", "request_id": request_id})
    await client.caller.expect({"type": "prefill_stopped", "request_id": request_id})


@check("prefill.cancel.late", roles=_PREFILL, says="one `prefill_stopped` | `prefill_stopped`")
async def _cancel_late(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    done, _ = await client.run(client.tokens(4))
    await client.caller.send({"type": "cancel", "request_id": done["request_id"]})
    await client.caller.expect({"type": "prefill_stopped", "request_id": done["request_id"]})


@check(
    "prefill.cancel.foreign",
    roles=_PREFILL,
    says="dropped, no answer while the request is there",
)
async def _cancel_foreign(context: CheckContext) -> None:
    client, other = await PrefillClient.open(context), await context.connect()
    landing = client.landing(client.block_size)
    client.owner.may_reply.clear()
    request_id = await client.start(client.tokens(client.block_size), landing)

    async def written() -> bool:
        return bool(client.owner.writes(landing.region["key"]))

    await context.until(written, "a write to the landing")
    await other.send({"type": "cancel", "request_id": request_id})
    await other.expect_none({"request_id": request_id})
    client.owner.may_reply.set()
    done = await client.end_of(request_id)
    require(done["type"] == "prefill_done", f"another connection's cancel ended it: {done}")


@check("prefill.expiry.before-the-first-write", roles=_PREFILL, says=_STARTS_NO_WRITE)
async def _expired(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    landing = client.landing(client.block_size)
    request_id = await client.start(
        client.tokens(client.block_size), landing, landing_expires_s=0.0
    )
    ended = await client.end_of(request_id)
    require(ended["type"] == "prefill_failed", f"ended by {ended['type']} without time to write")
    require(not client.owner.writes(landing.region["key"]), "wrote after the landing's time")


@check(
    "prefill.expiry.in-mid-write",
    roles=_PREFILL,
    says="each write has what is left of it as its own deadline.",
)
async def _expires(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    landing = client.landing(2 * client.block_size)
    client.owner.may_reply.clear()
    tokens = client.tokens(2 * client.block_size)
    request_id = await client.start(tokens, landing, landing_expires_s=2.0)
    ended = await client.end_of(request_id)
    client.owner.may_reply.set()
    require(ended["type"] == "prefill_failed", f"ended by {ended['type']} with unanswered writes")
    require(await client.quiet(landing) == 0, "wrote after prefill_failed")


# -- as a dialer -----------------------------------------------------------------------------------


@check(
    "transfer.dialer.damaged-on-the-way",
    roles=_PREFILL,
    says="With another checksum it is answered 6, and the initiator sends it again",
)
async def _sent_again(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    tokens = client.tokens(2 * client.block_size)
    _, first = await client.run(tokens)
    refused: list[int] = []

    def once(op: int, _: Any) -> int | None:
        if op == frames.WRITE and not refused:
            refused.append(1)
            return frames.CHECKSUM_MISMATCH
        return None

    client.owner.status_of = once
    _, landing = await client.run(tokens)
    require(refused, "it wrote nothing")
    one, other = client.kv(first, len(tokens)), client.kv(landing, len(tokens))
    client.require_near(one, other, "a slice that was sent again")


@check(
    "transfer.dialer.cut-in-mid-write",
    roles=_PREFILL,
    says="the numbers of those that it gave up in the middle of a write; its own segment",
)
async def _dialer_cut(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    tokens = client.tokens(2 * client.block_size)
    _, first = await client.run(tokens)
    client.owner.n_cuts = 1
    n_hellos = len(client.owner.hellos)
    _, landing = await client.run(tokens)
    later = client.owner.hellos[n_hellos:]
    require(later, "used a connection that was cut")
    over = [number for hello in later for number in hello.get("over", ())]
    require(over, "no later hello names the connection that it gave up in the middle of a write")
    one, other = client.kv(first, len(tokens)), client.kv(landing, len(tokens))
    client.require_near(one, other, "a write that was cut and sent again")


@check(
    "transfer.dialer.revoked-key",
    roles=_PREFILL,
    says="All is freed, nothing more will be written. `culprit`: an unreachable worker.",
)
async def _revoked(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    for status in (frames.NOT_GRANTED, frames.UNKNOWN_KEY, frames.OUT_OF_BOUNDS):
        landing = client.landing(client.block_size)
        key = landing.region["key"]
        client.owner.status_of = lambda op, entry, key=key, status=status: (  # type: ignore[misc]
            status if op == frames.WRITE and entry.key == key else None
        )
        request_id = await client.start(client.tokens(client.block_size), landing)
        ended = await client.end_of(request_id)
        require(ended["type"] == "prefill_failed", f"status {status}, and {ended['type']}")
        require(await client.quiet(landing, 0.5) == 0, "wrote after prefill_failed")


@check(
    "transfer.dialer.owner-away",
    roles=_PREFILL,
    says="All is freed, nothing more will be written. `culprit`: an unreachable worker.",
)
async def _owner_away(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    landing = client.landing(client.block_size)
    await client.owner.close()
    request_id = await client.start(client.tokens(client.block_size), landing)
    ended = await client.end_of(request_id)
    require(ended["type"] == "prefill_failed", f"{ended['type']} without an owner to write to")
    require(ended["retryable"] is True, "not retryable")
    require(
        ended.get("culprit") in (client.owner.name, None), f"its culprit is {ended.get('culprit')}"
    )


@check(
    "transfer.dialer.other-owner",
    roles=_PREFILL,
    keyed=True,
    says="A side that has a key refuses one that has none, before any request; a side that proves"
    " nothing gets no proof.",
)
async def _other_owner(context: CheckContext) -> None:
    for fault in ("proves_wrongly", "hides_nonce"):
        client = await PrefillClient.open(context)
        setattr(client.owner, fault, True)
        landing = client.landing(client.block_size)
        request_id = await client.start(client.tokens(client.block_size), landing)
        ended = await client.end_of(request_id)
        require(ended["type"] == "prefill_failed", f"wrote to an owner that {fault}")
        require(not client.owner.accesses, f"sent a request to an owner that {fault}")
