"""Check a prefill worker: what lands, commands that are not right, and stages of a group."""

import asyncio
from typing import Any

from halfmoon_conform.check import ServiceRole, check
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.peers.caller import is_draining_welcome
from halfmoon_conform.played_kvstore import PlayedKvstore
from halfmoon_conform.prefill_client import N_PAGES, PlayedLanding, PrefillClient
from halfmoon_conform.verdict import CheckFailed, CheckSkipped, require

_PREFILL: tuple[ServiceRole, ...] = ("prefill",)
_WRITES_NO_MORE = (
    "After `prefill_done`, `prefill_failed` or `prefill_stopped` the prefill worker writes no more."
)


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
    client.require_near(client.kv(first, n_tokens), client.kv(second, n_tokens), "two landings")


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
    client.require_near(one, other, "the blocks that two prompts begin with")
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
        client.require_near(one, other, f"{n_tokens} of {len(tokens)} tokens")
    if not (hashes := client.hashes(tokens)):
        return
    # Whatever the chunks are, they begin a block later then.
    kvstore.keep(hashes[0], client.page(longest, 0))
    cached = {"kvstore": kvstore.port.address, "n_blocks": 1}
    done, landing = await client.run(tokens, cached=cached)
    require(done["first_token"] == whole["first_token"], "another first token behind a block")
    one, other = client.kv(landing, len(tokens)), client.kv(longest, len(tokens))
    client.require_near(one, other, "tokens behind a cached block")


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


@check(
    "prefill.done.min-new-tokens",
    roles=_PREFILL,
    features=("min_tokens",),
    says="Of the first `min_new_tokens` tokens none is a stop token",
)
async def _min_new(context: CheckContext) -> None:
    client = await PrefillClient.open(context)
    tokens = client.tokens(client.block_size)
    done, _ = await client.run(tokens)
    stop = done["first_token"]
    stopping = {"max_new_tokens": 8, "stop_token_ids": [stop, 2**31], "min_new_tokens": 1}
    done, _ = await client.run(tokens, stopping=stopping)
    require(
        (done["first_token"] != stop, done["finish"]) == (True, ""),
        f"first token {done['first_token']}, finish {done['finish']!r}, with min_new_tokens 1 and "
        f"the stop token {stop}",
    )


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
    client.require_near(one, other, "the block behind the held ones")
    require(done["first_token"] == whole["first_token"], "another first token")


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
