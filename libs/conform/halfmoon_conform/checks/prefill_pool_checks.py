"""Check a prefill worker as a client of kvstores: cached prefixes and puts."""

import secrets
from typing import Any

from halfmoon_conform.check import ServiceRole, check
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.peers import transfer_frames as frames
from halfmoon_conform.peers.transfer_frames import checksum
from halfmoon_conform.played_kvstore import PlayedKvstore
from halfmoon_conform.prefill_client import PrefillClient
from halfmoon_conform.verdict import require

_PREFILL: tuple[ServiceRole, ...] = ("prefill",)


@check(
    "prefill.put.blocks",
    roles=_PREFILL,
    says="with the xxh3-64 (seed 0) of each block's bytes (or `revoke_blocks`)",
)
async def _put(context: CheckContext) -> None:
    client, kvstore = await PrefillClient.open(context), await PlayedKvstore.open(context)
    tokens = client.tokens(2 * client.block_size + 3)
    await client.fill(kvstore, tokens)
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


@check(
    "prefill.cached.read",
    roles=_PREFILL,
    says="A get takes a lease, reads, and releases.",
)
async def _cached(context: CheckContext) -> None:
    client, kvstore = await PrefillClient.open(context), await PlayedKvstore.open(context)
    n_tokens = 3 * client.block_size + 2
    tokens = client.tokens(n_tokens)
    whole, first = await client.fill(kvstore, tokens)
    cached = {"kvstore": kvstore.port.address, "n_blocks": 3}
    done, landing = await client.run(tokens, cached=cached)
    require(done["n_cached"] == 3 * client.block_size, f"n_cached is {done['n_cached']}")
    require(done["first_token"] == whole["first_token"], "another first token from cached blocks")
    client.require_near(client.kv(first, n_tokens), client.kv(landing, n_tokens), "cached blocks")
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
    whole, first = await client.fill(kvstore, tokens)
    cached = {"kvstore": kvstore.port.address, "n_blocks": 2}
    done, landing = await client.run(tokens, cached=cached)
    require(done["n_cached"] < len(tokens), "nothing was computed, and a token was chosen")
    require(done["first_token"] == whole["first_token"], "another first token from cached blocks")
    one, other = client.kv(first, len(tokens)), client.kv(landing, len(tokens))
    client.require_near(one, other, "cached blocks")


@check(
    "prefill.cached.damaged",
    roles=_PREFILL,
    says="The reader compares the checksums, before it uses a byte.",
)
async def _damaged(context: CheckContext) -> None:
    client, kvstore = await PrefillClient.open(context), await PlayedKvstore.open(context)
    n_tokens = 2 * client.block_size + 1
    tokens = client.tokens(n_tokens)
    whole, first = await client.fill(kvstore, tokens)
    kvstore.owner.damages_reads = True
    cached = {"kvstore": kvstore.port.address, "n_blocks": 2}
    landing = client.landing(n_tokens)
    done = await client.end_of(await client.start(tokens, landing, cached=cached))
    _require_right_or_again(client, done, whole)
    if done["type"] == "prefill_done":
        one, other = client.kv(first, n_tokens), client.kv(landing, n_tokens)
        client.require_near(one, other, "damaged blocks")
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
    client.require_near(client.kv(first, n_tokens), client.kv(landing, n_tokens), "without it")


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
