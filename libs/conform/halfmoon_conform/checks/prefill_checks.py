"""Check a prefill worker: pages, cached prefixes, puts, cancels, expiry and what is not right."""

import asyncio
import secrets
from typing import Any

from halfmoon_conform.check import ServiceRole, check
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.kv_compare import near
from halfmoon_conform.peers import transfer_frames as frames
from halfmoon_conform.peers.caller import is_draining_welcome
from halfmoon_conform.peers.transfer_frames import checksum
from halfmoon_conform.played_kvstore import PlayedKvstore
from halfmoon_conform.prefill_client import N_PAGES, PlayedLanding, PrefillClient
from halfmoon_conform.verdict import CheckFailed, CheckSkipped, require

_PREFILL: tuple[ServiceRole, ...] = ("prefill",)
_WRITES_NO_MORE = (
    "After `prefill_done`, `prefill_failed` or `prefill_stopped` the prefill worker writes no more."
)
_STARTS_NO_WRITE = "After that time the prefill worker starts no more writes"


def _require_near(client: PrefillClient, one: Any, other: Any, what: str) -> None:
    require(near(one, other, client.context.layout["dtype"]), f"{what}: other KV")


# -- what lands ------------------------------------------------------------------------------------


@check(
    "prefill.pages.nothing-outside",
    roles=_PREFILL,
    says="Compute these tokens' KV into the landing, choose the next token.",
)
async def _nothing_outside(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    size = client.block_size
    for n_tokens in (1, size - 1, size, size + 1, 3 * size + 2):
        tokens = client.tokens(n_tokens)
        done, landing = await client.run(tokens)
        require(done["finish"] == "", f"finish {done['finish']!r} of 8 tokens")
        for block in range(len(landing.pages)):
            filled = min(size, n_tokens - block * size)
            rows = client.rows(landing, block, filled)
            require(
                all(row.count(0xA5) < len(row) for row in rows),
                f"block {block} of {n_tokens} tokens has a side that was not written",
            )


@check(
    "prefill.pages.order",
    roles=_PREFILL,
    says="Page `p` of a pool begins at byte `p · block_bytes` of its region.",
)
async def _order(context: CheckContext) -> None:
    """Land a prompt twice in other pages: block i is in page i of each."""
    client = await PrefillClient.open(context)
    n_tokens = 3 * client.block_size + 1
    tokens = client.tokens(n_tokens)
    one, first = await client.run(tokens)
    other, second = await client.run(tokens)
    require(one["first_token"] == other["first_token"], "another first token for the same prompt")
    _require_near(client, client.kv(first, n_tokens), client.kv(second, n_tokens), "two landings")


@check(
    "prefill.pages.prefix",
    roles=_PREFILL,
    says="A block is one run of `block_bytes` bytes, little-endian, in this order:",
)
async def _prefix(context: CheckContext) -> None:
    """Compute a prompt and a longer one: the KV of what both begin with is the same."""
    client = await PrefillClient.open(context)
    size = client.block_size
    tokens = client.tokens(4 * size)
    _, short = await client.run(tokens[: 2 * size])
    _, long = await client.run(tokens)
    one, other = client.kv(short, 2 * size), client.kv(long, 4 * size)[:2]
    _require_near(client, one, other, "the blocks that two prompts begin with")
    different = client.kv(long, 4 * size)
    require(different[0] != different[1], "two blocks of other tokens have the same KV")


#: Prompts end around these many tokens: a service may compute them in chunks that end there.
_EDGES = (32, 64)


@check(
    "prefill.pages.chunk-edges",
    roles=_PREFILL,
    says="Compute these tokens' KV into the landing, choose the next token.",
)
async def _chunk_edges(context: CheckContext) -> None:
    """End prompts around usual edges, and begin behind a cached block: the KV is the same."""
    client, kvstore = await PrefillClient.open(context), await PlayedKvstore.open(context)
    room = N_PAGES * client.block_size
    lengths = [n for edge in _EDGES for n in (edge - 1, edge, edge + 1) if n <= room]
    if not lengths:
        raise CheckSkipped(f"the kit's pages hold {room} tokens of its blocks")
    tokens = client.tokens(lengths[-1])
    whole, longest = await client.run(tokens)
    for n_tokens in lengths[:-1]:
        _, landing = await client.run(tokens[:n_tokens])
        one, other = client.kv(landing, n_tokens), client.kv(longest, n_tokens)
        _require_near(client, one, other, f"{n_tokens} of {len(tokens)} tokens")
    if not (hashes := client.hashes(tokens)):
        return
    # Whatever the chunks are, they begin a block later then.
    kvstore.keep(hashes[0], client.page(longest, 0))
    cached = {"kvstore": kvstore.port.address, "n_blocks": 1}
    done, landing = await client.run(tokens, cached=cached)
    require(done["first_token"] == whole["first_token"], "another first token behind a block")
    one, other = client.kv(landing, len(tokens)), client.kv(longest, len(tokens))
    _require_near(client, one, other, "tokens behind a cached block")


@check(
    "prefill.done.all-acknowledged", roles=_PREFILL, says="All KV of the landing is acknowledged"
)
async def _acknowledged(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    landing = client.landing(2 * client.block_size)
    client.owner.may_reply.clear()
    request_id = await client.start(client.tokens(2 * client.block_size), landing)

    async def written() -> bool:
        return bool(client.owner.writes(landing.region["key"]))

    await context.until(written, "a write to the landing")
    await client.caller.settle()
    early = [m for m in client.caller.inbox if m.get("request_id") == request_id]
    client.owner.may_reply.set()
    require(not early, f"{early[:1]} before its writes were acknowledged")
    done = await client.end_of(request_id)
    require(done["type"] == "prefill_done", f"{done}")


@check("prefill.done.writes-no-more", roles=_PREFILL, says=_WRITES_NO_MORE)
async def _done_writes_no_more(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    _, landing = await client.run(client.tokens(2 * client.block_size))
    require(await client.quiet(landing, 1.0) == 0, "wrote after prefill_done")


@check(
    "prefill.done.draws",
    roles=_PREFILL,
    features=("sampling",),
    says="`sampling`, its seed included",
)
async def _draws(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    tokens = client.tokens(client.block_size)
    drawn = []
    for seed in (3, 3, *range(10, 18)):
        done, _ = await client.run(tokens, sampling={"temperature": 100.0, "seed": seed})
        drawn.append(done["first_token"])
    require(drawn[0] == drawn[1], f"the same seed drew {drawn[0]} and then {drawn[1]}")
    require(len(set(drawn)) > 1, "nine seeds drew the same token")


@check("prefill.done.finish", roles=_PREFILL, says='`finish` is "", "stop" or "length".')
async def _finish(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    tokens = client.tokens(client.block_size)
    done, _ = await client.run(tokens, stopping={"max_new_tokens": 1})
    require(done["finish"] == "length", f"finish {done['finish']!r} after the only token")
    first = done["first_token"]
    done, _ = await client.run(tokens, stopping={"max_new_tokens": 8, "stop_token_ids": [first]})
    require(done["finish"] == "stop", f"finish {done['finish']!r} after a stop token")
    stopping = {"max_new_tokens": 8, "stop_token_ids": [first], "min_new_tokens": 2}
    done, _ = await client.run(tokens, stopping=stopping)
    require(done["finish"] == "", f"finish {done['finish']!r} at the first of at least two tokens")


@check(
    "prefill.done.scores",
    roles=_PREFILL,
    features=("logprobs", "prompt_logprobs"),
    says="Has the token, durations (`times` only for metrics), and log probabilities if requested.",
)
async def _scores(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    tokens = client.tokens(client.block_size + 3)
    plain, _ = await client.run(tokens)
    require(plain.get("score") is None, "a score that was not requested")
    sampling = {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1}
    done, _ = await client.run(tokens, sampling=sampling)
    require(done.get("score") is not None, "no score of the first token")
    n_scores = len(done.get("prompt_scores", ()))
    require(n_scores == len(tokens) - 1, f"{n_scores} scores of a prompt of {len(tokens)} tokens")
    require(done["first_token"] == plain["first_token"], "another token because of the scores")


@check("prefill.done.beside-others", roles=_PREFILL, says="never another connection's request")
async def _beside_others(context: CheckContext) -> None:
    clients = [await PrefillClient.open(context) for _ in range(3)]
    lengths = (1, clients[0].block_size, 3 * clients[0].block_size + 5)
    prompts = [clients[0].tokens(n) for n in lengths]
    alone = [(await clients[0].run(prompt))[0]["first_token"] for prompt in prompts]
    together = await asyncio.gather(
        *(client.run(prompt) for client, prompt in zip(clients, prompts, strict=True))
    )
    tokens = [done["first_token"] for done, _ in together]
    require(tokens == alone, f"first tokens {tokens} together, {alone} alone")


@check(
    "prefill.held.not-written",
    roles=_PREFILL,
    claims=("skips_held_blocks",),
    says="the receiver writes the blocks behind them only.",
)
async def _held(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    n_tokens = 3 * client.block_size
    tokens = client.tokens(n_tokens)
    whole, first = await client.run(tokens)
    done, landing = await client.run(tokens, n_held_blocks=2)
    for block in (0, 1):
        page = client.page(landing, block)
        require(page.count(0xA5) == len(page), f"wrote to held block {block}")
    one, other = client.kv(first, n_tokens)[2:], client.kv(landing, n_tokens)[2:]
    _require_near(client, one, other, "the block behind the held ones")
    require(done["first_token"] == whole["first_token"], "another first token")


# -- the kvstore -----------------------------------------------------------------------------------


@check(
    "prefill.put.blocks",
    roles=_PREFILL,
    says="with the xxh3-64 (seed 0) of each block's bytes (or `revoke_blocks`)",
)
async def _put(context: CheckContext) -> None:
    client, kvstore = await PrefillClient.open(context), await PlayedKvstore.open(context)
    tokens = client.tokens(2 * client.block_size + 3)
    await _fill(client, kvstore, tokens)
    hashes = client.hashes(tokens)
    (reserve,) = [m for m in kvstore.reserved if m["hashes"][0] == hashes[0]][:1]
    require(reserve["parent"] is None, "the first block of a prompt has a parent")
    require(reserve["hashes"] == hashes, "reserved other blocks than the prompt's full ones")
    require(
        reserve["token_ids"] == tokens[: 2 * client.block_size], "token_ids are not the blocks'"
    )
    for each in hashes:
        _, total = kvstore.stored[each]
        require(checksum(kvstore.body(each)) == total, "committed another checksum than the bytes'")


async def _fill(
    client: PrefillClient, kvstore: PlayedKvstore, tokens: list[int]
) -> tuple[Any, PlayedLanding]:
    """Have the subject put a prompt's blocks into a kvstore, and return how it ended."""
    done, landing = await client.run(tokens, store_in=kvstore.port.address)
    hashes = client.hashes(tokens)

    async def stored() -> bool:
        return all(each in kvstore.stored for each in hashes)

    await client.context.until(stored, "the prompt's blocks are committed")
    for block, each in enumerate(hashes):
        require(kvstore.body(each) == client.page(landing, block), "stored other bytes than landed")
    return done, landing


@check(
    "prefill.cached.read",
    roles=_PREFILL,
    says="A get takes a lease, reads, and releases.",
)
async def _cached(context: CheckContext) -> None:
    client, kvstore = await PrefillClient.open(context), await PlayedKvstore.open(context)
    n_tokens = 3 * client.block_size + 2
    tokens = client.tokens(n_tokens)
    whole, first = await _fill(client, kvstore, tokens)
    cached = {"kvstore": kvstore.port.address, "n_blocks": 3}
    done, landing = await client.run(tokens, cached=cached)
    require(done["n_cached"] == 3 * client.block_size, f"n_cached is {done['n_cached']}")
    require(done["first_token"] == whole["first_token"], "another first token from cached blocks")
    _require_near(client, client.kv(first, n_tokens), client.kv(landing, n_tokens), "cached blocks")
    await kvstore.port.expect({"type": "release_lease"})


@check(
    "prefill.cached.at-least-one-token",
    roles=_PREFILL,
    says="Compute these tokens' KV into the landing, choose the next token.",
)
async def _cached_whole(context: CheckContext) -> None:
    """Cache each block of a prompt: there is still a token to choose."""
    client, kvstore = await PrefillClient.open(context), await PlayedKvstore.open(context)
    tokens = client.tokens(2 * client.block_size)
    whole, first = await _fill(client, kvstore, tokens)
    cached = {"kvstore": kvstore.port.address, "n_blocks": 2}
    done, landing = await client.run(tokens, cached=cached)
    require(done["n_cached"] < len(tokens), "nothing was computed, and a token was chosen")
    require(done["first_token"] == whole["first_token"], "another first token from cached blocks")
    one, other = client.kv(first, len(tokens)), client.kv(landing, len(tokens))
    _require_near(client, one, other, "cached blocks")


@check(
    "prefill.cached.damaged",
    roles=_PREFILL,
    says="The reader compares the checksums, before it uses a byte.",
)
async def _damaged(context: CheckContext) -> None:
    client, kvstore = await PrefillClient.open(context), await PlayedKvstore.open(context)
    n_tokens = 2 * client.block_size + 1
    tokens = client.tokens(n_tokens)
    whole, first = await _fill(client, kvstore, tokens)
    kvstore.owner.damages_reads = True
    cached = {"kvstore": kvstore.port.address, "n_blocks": 2}
    landing = client.landing(n_tokens)
    done = await client.end_of(await client.start(tokens, landing, cached=cached))
    _require_right_or_again(client, done, whole)
    if done["type"] == "prefill_done":
        one, other = client.kv(first, n_tokens), client.kv(landing, n_tokens)
        _require_near(client, one, other, "damaged blocks")
    await kvstore.port.expect({"type": "verify_blocks"})


def _require_right_or_again(client: PrefillClient, done: Any, whole: Any) -> None:
    """See that a prompt whose cached blocks can't be read is computed, or may be tried again."""
    if done["type"] == "prefill_failed":
        require(done["retryable"] is True, f"not retryable: {done}")
        return
    require(done["type"] == "prefill_done", f"ended by {done['type']}")
    require(done["first_token"] == whole["first_token"], "another first token")


async def _done_without(context: CheckContext, break_it: Any, n_blocks: int = 2) -> None:
    """Break a kvstore that has a prompt's blocks: the prompt is computed all the same."""
    client, kvstore = await PrefillClient.open(context), await PlayedKvstore.open(context)
    n_tokens = 2 * client.block_size + 1
    tokens = client.tokens(n_tokens)
    whole, first = await client.run(tokens)
    for block, each in enumerate(client.hashes(tokens)):
        kvstore.keep(each, client.page(first, block))
    await break_it(kvstore)
    cached = {"kvstore": kvstore.port.address, "n_blocks": n_blocks}
    done, landing = await client.run(tokens, cached=cached)
    require(done["first_token"] == whole["first_token"], "another first token")
    _require_near(client, client.kv(first, n_tokens), client.kv(landing, n_tokens), "without it")


_WITHOUT = "the kvstore is done without"


@check("prefill.cached.silent-kvstore", roles=_PREFILL, says=_WITHOUT)
async def _silent(context: CheckContext) -> None:
    async def break_it(kvstore: PlayedKvstore) -> None:
        kvstore.silent = True

    await _done_without(context, break_it)


@check("prefill.cached.refused", roles=_PREFILL, says=_WITHOUT)
async def _refused(context: CheckContext) -> None:
    async def break_it(kvstore: PlayedKvstore) -> None:
        kvstore.lease_answer = {"type": "kvstore_refused", "reason": "conformance"}

    await _done_without(context, break_it)


@check(
    "prefill.cached.fewer-blocks", roles=_PREFILL, says="Hold the longest stored prefix of these."
)
async def _fewer(context: CheckContext) -> None:
    async def break_it(kvstore: PlayedKvstore) -> None:
        kvstore.stored = dict(list(kvstore.stored.items())[:1])

    await _done_without(context, break_it)


@check("prefill.cached.nonsense", roles=_PREFILL, says=_WITHOUT)
async def _nonsense(context: CheckContext) -> None:
    async def break_it(kvstore: PlayedKvstore) -> None:
        block = next(iter(kvstore.stored))
        kvstore.lease_answer = {
            "type": "blocks_leased",
            "region": kvstore.region,
            "places": [[secrets.token_bytes(16), 2**40, 1], [block, 2**47, 1]],
            "expires_s": 10.0,
        }

    await _done_without(context, break_it)


@check(
    "prefill.cached.unreadable",
    roles=_PREFILL,
    says="Compute these tokens' KV into the landing, choose the next token.",
)
async def _cut_reads(context: CheckContext) -> None:
    client, kvstore = await PrefillClient.open(context), await PlayedKvstore.open(context)
    tokens = client.tokens(2 * client.block_size + 1)
    whole, first = await client.run(tokens)
    for block, each in enumerate(client.hashes(tokens)):
        kvstore.keep(each, client.page(first, block))
    kvstore.owner.status_of = lambda op, _: frames.UNKNOWN_KEY if op == frames.READ else None
    landing = client.landing(len(tokens))
    cached = {"kvstore": kvstore.port.address, "n_blocks": 2}
    done = await client.end_of(await client.start(tokens, landing, cached=cached))
    _require_right_or_again(client, done, whole)
    client.require_untouched(landing)


@check("prefill.cached.away", roles=_PREFILL, says=_WITHOUT)
async def _away(context: CheckContext) -> None:
    async def break_it(kvstore: PlayedKvstore) -> None:
        await kvstore.port.close()
        await kvstore.owner.close()

    await _done_without(context, break_it)


@check(
    "prefill.cached.replica",
    roles=_PREFILL,
    says="answers of a kvstore | dropped | a lease or a reservation is given back",
)
async def _replica(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    broken, whole = await PlayedKvstore.open(context), await PlayedKvstore.open(context)
    tokens = client.tokens(2 * client.block_size + 1)
    plain, first = await client.run(tokens)
    for block, each in enumerate(client.hashes(tokens)):
        whole.keep(each, client.page(first, block))
    broken.lease_answer = {"type": "kvstore_refused", "reason": "conformance"}
    cached = {
        "kvstore": broken.port.address,
        "n_blocks": 2,
        "replicas": [whole.port.address],
    }
    done, _ = await client.run(tokens, cached=cached)
    require(done["first_token"] == plain["first_token"], "another first token")
    require(done["n_cached"] == 2 * client.block_size, f"n_cached is {done['n_cached']}")
    name = whole.port.record["worker_id"]
    require(done.get("fetched_from") == name, f"fetched_from is {done.get('fetched_from')!r}")


@check("prefill.put.silent-kvstore", roles=_PREFILL, says=_WITHOUT)
async def _put_silent(context: CheckContext) -> None:
    client, kvstore = await PrefillClient.open(context), await PlayedKvstore.open(context)
    kvstore.silent = True
    await client.run(client.tokens(2 * client.block_size), store_in=kvstore.port.address)


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
    await _fill(client, kvstore, tokens)
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
    _require_near(client, one, other, "a slice that was sent again")


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
    _require_near(client, one, other, "a write that was cut and sent again")


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


# -- what is not right -----------------------------------------------------------------------------


@check("prefill.start.twice", roles=_PREFILL, says="*Duplicate* is one said twice.")
async def _start_twice(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    tokens = client.tokens(2 * client.block_size)
    landing = client.landing(len(tokens))
    client.owner.may_reply.clear()
    request_id = await client.start(tokens, landing)
    await client.start(tokens, landing, request_id)
    await client.caller.settle()
    client.owner.may_reply.set()
    done = await client.end_of(request_id)
    require(done["type"] == "prefill_done", f"{done}")
    await client.caller.expect_none({"request_id": request_id})


@check(
    "prefill.start.foreign", roles=_PREFILL, says="`prefill_failed`, retryable: the id is in use"
)
async def _start_foreign(context: CheckContext) -> None:
    client, other = await PrefillClient.open(context), await PrefillClient.open(context)
    tokens = client.tokens(client.block_size)
    landing = client.landing(len(tokens))
    client.owner.may_reply.clear()
    request_id = await client.start(tokens, landing)
    await client.caller.settle()
    await other.start(tokens, other.landing(len(tokens)), request_id)
    refused = await other.end_of(request_id)
    require(refused["type"] == "prefill_failed", f"answered {refused['type']}")
    require(refused["retryable"] is True, "not retryable")
    client.owner.may_reply.set()
    done = await client.end_of(request_id)
    require(done["type"] == "prefill_done", f"{done}")


@check(
    "prefill.start.absurd",
    roles=_PREFILL,
    says="Where a request is refused as absurd, the answer names the field, the value and the"
    " limit, and is not retryable.",
)
async def _absurd(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    size = client.block_size
    tokens = client.tokens(2 * size)
    landing = client.landing(len(tokens))
    other_layout = PlayedLanding(
        landing.region, landing.pages, {**context.layout, "model": "other"}
    )
    twice = PlayedLanding(landing.region, [3, 3], context.layout)
    behind = PlayedLanding(landing.region, [0, N_PAGES], context.layout)
    short = PlayedLanding(landing.region, landing.pages[:1], context.layout)
    cases: list[tuple[str, list[int], PlayedLanding, dict[str, Any]]] = [
        ("no tokens", [], landing, {}),
        ("a token behind the vocabulary", [*tokens[:-1], 2**32 - 1], landing, {}),
        ("n_prompt over the tokens", tokens, landing, {"n_prompt": len(tokens) + 1}),
        ("more hashes than blocks", tokens[:-1], landing, {"block_hashes": client.hashes(tokens)}),
        ("another layout", tokens, other_layout, {}),
        ("a page twice", tokens, twice, {}),
        ("a page behind the region", tokens, behind, {}),
        ("too few pages", tokens, short, {}),
    ]
    if (
        context.subject.record.get("max_context", 0)
        and context.subject.record["max_context"] < 9000
    ):
        long = client.tokens(context.subject.record["max_context"] + 1)
        cases.append(("more tokens than max_context", long, landing, {"block_hashes": []}))
    for what, prompt, into, more in cases:
        request_id = await client.start(prompt, into, **more)
        failed = await client.end_of(request_id)
        require(failed["type"] == "prefill_failed", f"{what}: {failed['type']}")
        require(failed["retryable"] is False, f"{what}: retryable")
        require(failed["reason"], f"{what}: no reason")
    require(not client.owner.writes(landing.region["key"]), "wrote for a start that it refused")
    await client.run(client.tokens(4))


@check(
    "prefill.held.all",
    roles=_PREFILL,
    claims=("skips_held_blocks",),
    says="The block with the prompt's last token is never among them.",
)
async def _held_all(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    tokens = client.tokens(2 * client.block_size)
    landing = client.landing(len(tokens))
    request_id = await client.start(tokens, landing, n_held_blocks=2)
    failed = await client.end_of(request_id)
    require(failed["type"] == "prefill_failed", f"{failed['type']} of a prompt that is all held")


@check(
    "prefill.drain.finishes",
    roles=_PREFILL,
    needs="killable",
    says="Workers that are draining refuse `reserve_decode`, `start_prefill`, `reserve_blocks` and"
    " `replicate_blocks`, so that the conductor asks another one.",
)
async def _drain(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    tokens = client.tokens(client.block_size)
    landing = client.landing(len(tokens))
    client.owner.may_reply.clear()
    request_id = await client.start(tokens, landing)
    await context.renewed()
    await context.subject.ask_to_stop()
    await client.caller.take(is_draining_welcome, "a welcome that says draining")
    refused = await client.end_of(await client.start(tokens, client.landing(len(tokens))))
    require(refused["type"] == "prefill_failed", "took a new prompt while draining")
    require(refused["retryable"] is True, "not retryable")
    client.owner.may_reply.set()
    done = await client.end_of(request_id)
    require(done["type"] == "prefill_done", f"did not finish what it had: {done}")

    async def stopped() -> bool:
        process = context.subject.process
        return process is not None and not process.running

    await context.until(stopped, "it ends when it has nothing left", 40)


@check(
    "prefill.codes.of-failures",
    roles=_PREFILL,
    says="Refusals and failures say in `code` why, for programs; `reason` is for people.",
)
async def _codes(context: CheckContext) -> None:
    client, other = await PrefillClient.open(context), await PrefillClient.open(context)
    tokens = client.tokens(client.block_size)
    landing = client.landing(len(tokens))
    client.owner.may_reply.clear()
    held = await client.start(tokens, landing)
    await client.caller.settle()
    await other.start(tokens, other.landing(len(tokens)), held)
    found = {"id_in_use": await other.end_of(held)}
    client.owner.may_reply.set()
    await client.end_of(held)
    layout = {**context.layout, "model": "another"}
    elsewhere = PlayedLanding(landing.region, landing.pages, layout)
    found["layout_mismatch"] = await client.end_of(await client.start(tokens, elsewhere))
    wrong = await client.start(tokens, landing, n_prompt=len(tokens) + 1)
    found["invalid"] = await client.end_of(wrong)
    await client.owner.close()
    found["peer_failed"] = await client.end_of(await client.start(tokens, landing))
    for code, message in found.items():
        require(
            message.get("code") == code, f"code {message.get('code')!r}, not {code!r}: {message}"
        )


# -- stages of a group -----------------------------------------------------------------------------


@check(
    "prefill.stage.contradiction",
    roles=_PREFILL,
    claims=("stage",),
    says="A stage whose record contradicts `start_share` (group, index, number of stages, layers,"
    " layout) answers `share_ended` and names both values.",
)
async def _stage_contradiction(context: CheckContext) -> None:
    stage = context.subject.record["stage"]
    if stage["index"] == 0:
        raise CheckSkipped("it is stage 0, which gets no shares")
    client = await PrefillClient.open(context)
    tokens = client.tokens(client.block_size)
    for field, value in (("group", "another"), ("index", 0), ("n_stages", stage["n_stages"] + 1)):
        request_id = context.name("share")
        await client.caller.send(
            {
                "type": "start_share",
                "request_id": request_id,
                "stage": {**stage, field: value},
                "layout": context.layout,
                "token_ids": tokens,
                "n_prompt": len(tokens),
                "landing": client.landing(len(tokens)).as_map(),
                "landing_expires_s": 60.0,
                "sampling": {"temperature": 0.0},
            }
        )
        ended = await client.end_of(request_id)
        require(ended["type"] == "share_ended", f"took a share with another {field}: {ended}")
        require(str(value) in ended["reason"], f"does not name {value!r}: {ended['reason']}")


@check(
    "prefill.stage.stop-unknown",
    roles=_PREFILL,
    claims=("stage",),
    says="Forget the share, free all. Unknown ids are fine.",
)
async def _stage_stop(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    request_id = context.name("never")
    await client.caller.send({"type": "stop_share", "request_id": request_id})
    ended = await client.end_of(request_id)
    require(ended["type"] == "share_ended", f"{ended}")


@check(
    "prefill.stage.layers-only",
    roles=_PREFILL,
    claims=("stage_layers_only",),
    says="a conductor leaves it out where it chooses one worker, and the member answers a"
    " `start_prefill` without `stages` with `prefill_failed`, retryable, naming itself.",
)
async def _layers_only(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    tokens = client.tokens(client.block_size)
    request_id = await client.start(tokens, client.landing(len(tokens)))
    failed = await client.end_of(request_id)
    if failed["type"] != "prefill_failed":
        raise CheckFailed(f"{failed['type']} by a member that has some layers alone")
    require(failed["retryable"] is True, "not retryable")
    require(failed.get("culprit") == context.subject.worker_id, "does not name itself")
