"""Check what a decode worker's record claims: kept answers, and prefill at decode."""

from typing import Any

import xxhash

from halfmoon_conform.check import ServiceRole, check
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.decode_client import DecodeAnswer, DecodeClient, make_kv
from halfmoon_conform.peers.wire_maps import WireMap
from halfmoon_conform.played_kvstore import PlayedKvstore
from halfmoon_conform.verdict import CheckSkipped, require
from halfmoon_protocol.blocks import block_hashes, child_hashes, root_hash

_DECODE: tuple[ServiceRole, ...] = ("decode",)
#: Token ids that any model has.
_MAX_TOKEN = 64


def _tokens(context: CheckContext, n_tokens: int) -> list[int]:
    return [context.chance.randrange(_MAX_TOKEN) for _ in range(n_tokens)]


def _hashes(context: CheckContext, tokens: list[int]) -> list[bytes]:
    layout = context.layout
    found = block_hashes(tokens, model=layout["model"], block_size=layout["block_size"])
    return [bytes(each) for each in found]


# -- kept answers ----------------------------------------------------------------------------------


@check(
    "decode.answers.complete-blocks",
    roles=_DECODE,
    claims=("keeps_answers",),
    says="The worker puts each block that it completes there, as any client does,"
    " and answers nothing.",
)
async def _answer_blocks(context: CheckContext) -> None:
    client, kvstore = await DecodeClient.open(context), await PlayedKvstore.open(context)
    size = context.layout["block_size"]
    n_tokens = size + size // 2
    prompt, kv = _tokens(context, n_tokens), make_kv(context.chance, context.layout, n_tokens)
    (parent,) = _hashes(context, prompt)
    tail = prompt[size:]
    chain = {"store_in": kvstore.port.address, "parent": parent, "tail": tail}
    # The prompt's last block is completed, and one after it; the first token counts.
    found = await client.run(kv, n_tokens, 2 * size, first_token=1, answer_chain=chain)
    require(found.finish == "length", f"the request ended otherwise: {found.failed}")
    tokens = [*tail, 1, *found.tokens]
    whole = child_hashes(parent, tokens[: 2 * size], block_size=size)  # type: ignore[arg-type]
    expected = [bytes(each) for each in whole]

    async def stored() -> bool:
        return set(expected) <= set(kvstore.stored)

    await context.until(stored, "the completed blocks are committed")
    require(set(kvstore.stored) == set(expected), "put other blocks than the completed ones")
    for put in kvstore.reserved:
        first = expected.index(put["hashes"][0])
        before = parent if first == 0 else expected[first - 1]
        require(put["parent"] == before, "a put does not continue the chain")
        end = first + len(put["hashes"])
        require(put["token_ids"] == tokens[first * size : end * size], "not the blocks' token_ids")
    for each in expected:
        total = kvstore.stored[each][1]
        require(xxhash.xxh3_64_intdigest(kvstore.body(each)) == total, "committed another checksum")
    _require_landed_rows(context, kvstore.body(expected[0]), kv[1], n_tokens - size)


def _require_landed_rows(context: CheckContext, block: bytes, landed: bytes, n_rows: int) -> None:
    """See that a block begins with the rows that landed, in each layer, for keys and values."""
    layout = context.layout
    side = len(block) // (2 * layout["n_layers"])
    n_bytes = n_rows * side // layout["block_size"]
    for start in range(0, len(block), side):
        same = block[start : start + n_bytes] == landed[start : start + n_bytes]
        require(same, "the block does not begin with the KV of the prompt's last tokens")


@check(
    "decode.answers.tail-of-another-length",
    roles=_DECODE,
    claims=("keeps_answers",),
    says="A `tail` of another length than the landing's is `decode_failed`.",
)
async def _other_tail(context: CheckContext) -> None:
    client, kvstore = await DecodeClient.open(context), await PlayedKvstore.open(context)
    size = context.layout["block_size"]
    root = root_hash(model=context.layout["model"], salt="", block_size=size)
    chain = {"store_in": kvstore.port.address, "parent": bytes(root), "tail": [1, 2]}
    kv = make_kv(context.chance, context.layout, 3)
    answer = await client.run(kv, 3, answer_chain=chain)
    require(answer.failed is not None, "decoded all the same")


@check(
    "decode.answers.silent-kvstore",
    roles=_DECODE,
    claims=("keeps_answers",),
    says="The worker puts each block that it completes there, as any client does,"
    " and answers nothing.",
)
async def _silent_store(context: CheckContext) -> None:
    client, kvstore = await DecodeClient.open(context), await PlayedKvstore.open(context)
    kvstore.silent = True
    size = context.layout["block_size"]
    kv = make_kv(context.chance, context.layout, size)
    prompt = _tokens(context, size)
    chain = {"store_in": kvstore.port.address, "parent": _hashes(context, prompt)[0], "tail": []}
    without = await client.run(kv, size, 2 * size)
    beside = await client.run(kv, size, 2 * size, answer_chain=chain)
    require(beside.finish == without.finish, f"the kvstore's silence ended it: {beside.failed}")
    require(beside.tokens == without.tokens, "the kvstore's silence changed tokens")


# -- prefill at decode -----------------------------------------------------------------------------


class _LocalPrefill:
    """Run prompts that the subject prefills into landings of its own."""

    def __init__(self, context: CheckContext, client: DecodeClient) -> None:
        self.context, self.client = context, client
        self.most = int(context.subject.record["local_prefill_tokens"])

    @classmethod
    async def open(cls, context: CheckContext) -> "_LocalPrefill":
        """Connect."""
        return cls(context, await DecodeClient.open(context))

    async def start(self, reserved: WireMap, tokens: list[int], **more: Any) -> None:
        """Ask for the prefill of a landing; `more` replaces fields."""
        await self.client.caller.send(
            {
                "type": "start_prefill",
                "request_id": reserved["request_id"],
                "token_ids": tokens,
                "n_prompt": len(tokens),
                "block_hashes": _hashes(self.context, tokens),
                "landing": reserved["landing"],
                "landing_expires_s": 60.0,
                "sampling": {"temperature": 0.0},
                "stopping": {"max_new_tokens": 8},
                **more,
            }
        )

    async def end(self, reserved: WireMap) -> WireMap:
        """Return the message that ends the prefill."""
        name = reserved["request_id"]
        return await self.client.caller.take(
            lambda m: m.get("request_id") == name, f"the end of the prefill of {name}"
        )

    async def run(self, tokens: list[int]) -> tuple[int, DecodeAnswer]:
        """Prefill and decode a prompt; return its first token and the others."""
        reserved = await self.client.landing(len(tokens))
        await self.start(reserved, tokens)
        done = await self.end(reserved)
        require(done["type"] == "prefill_done", f"{done['type']}: {done.get('reason', '')}")
        name, first = reserved["request_id"], done["first_token"]
        if done.get("finish"):
            return first, DecodeAnswer()
        await self.client.start(name, first_token=first, n_prompt=len(tokens))
        return first, await self.client.answer(name)

    async def require_refused(self, reserved: WireMap, tokens: list[int], **more: Any) -> WireMap:
        """See that a prefill is refused with a reason."""
        await self.start(reserved, tokens, **more)
        failed = await self.end(reserved)
        require(failed["type"] == "prefill_failed", f"answered {failed['type']}")
        require(failed["reason"], "refused without a reason")
        return failed


_LOCAL = ("local_prefill_tokens",)


@check(
    "decode.local-prefill.tokens-repeat",
    roles=_DECODE,
    claims=_LOCAL,
    says="It answers with the same messages, computes the rest in one of its steps or between"
    " several, and goes on after `start_decode`.",
)
async def _local_repeats(context: CheckContext) -> None:
    local = await _LocalPrefill.open(context)
    tokens = _tokens(context, min(local.most, 2 * context.layout["block_size"] + 3))
    first = await local.run(tokens)
    again = await local.run(tokens)
    require(first[0] == again[0], "another first token for the same prompt")
    require(first[1].tokens == again[1].tokens, "other tokens for the same prompt")
    require(first[1].failed is None, f"failed: {first[1].failed}")


@check(
    "decode.local-prefill.too-long",
    roles=_DECODE,
    claims=_LOCAL,
    says="`start_prefill` is refused with `prefill_failed` for a landing of another connection,"
    " for other pages than the landing's, and for a longer rest.",
)
async def _local_too_long(context: CheckContext) -> None:
    local = await _LocalPrefill.open(context)
    tokens = _tokens(context, local.most + 1)
    reserved = await local.client.landing(len(tokens))
    await local.require_refused(reserved, tokens)


@check(
    "decode.local-prefill.other-pages",
    roles=_DECODE,
    claims=_LOCAL,
    says="`start_prefill` is refused with `prefill_failed` for a landing of another connection,"
    " for other pages than the landing's, and for a longer rest.",
)
async def _local_other_pages(context: CheckContext) -> None:
    local = await _LocalPrefill.open(context)
    tokens = _tokens(context, 1)
    mine, other = await local.client.landing(1), await local.client.landing(1)
    pages = {**mine["landing"], "pages": other["landing"]["pages"]}
    failed = await local.require_refused(mine, tokens, landing=pages)
    require(failed["retryable"] is False, "retryable, and no new try can help")


@check(
    "decode.local-prefill.foreign-landing",
    roles=_DECODE,
    claims=_LOCAL,
    says="`start_prefill` is refused with `prefill_failed` for a landing of another connection,"
    " for other pages than the landing's, and for a longer rest.",
)
async def _local_foreign(context: CheckContext) -> None:
    mine, theirs = await _LocalPrefill.open(context), await _LocalPrefill.open(context)
    tokens = _tokens(context, 1)
    reserved = await mine.client.landing(1)
    await theirs.require_refused(reserved, tokens)
    # The landing is still its owner's.
    await mine.start(reserved, tokens)
    done = await mine.end(reserved)
    require(done["type"] == "prefill_done", "a foreign start took the landing")


@check(
    "decode.local-prefill.started-before-its-end",
    roles=_DECODE,
    claims=_LOCAL,
    says="`start_decode` before `prefill_done` ends in `decode_failed`.",
)
async def _started_early(context: CheckContext) -> None:
    local = await _LocalPrefill.open(context)
    tokens = _tokens(context, min(local.most, 2 * context.layout["block_size"] + 3))
    reserved = await local.client.landing(len(tokens))
    name = reserved["request_id"]
    await local.start(reserved, tokens)
    await local.client.start(name, n_prompt=len(tokens))
    answer = await local.client.answer(name, n_tokens=1)
    if answer.failed is None:
        raise CheckSkipped("its prefill was over before the start came")


@check(
    "decode.local-prefill.cancel",
    roles=_DECODE,
    claims=_LOCAL,
    says="`cancel` frees all that it holds of the request, in whichever state,"
    " and is not answered.",
)
async def _local_cancel(context: CheckContext) -> None:
    local = await _LocalPrefill.open(context)
    tokens = _tokens(context, min(local.most, context.layout["block_size"] + 1))
    for _ in range(20):
        reserved = await local.client.landing(len(tokens))
        await local.start(reserved, tokens)
        name = reserved["request_id"]
        await local.client.caller.send({"type": "cancel", "request_id": name})
    # So many landings find room, and requests of the next do as before.
    first = await local.run(tokens)
    require(first[1].failed is None, f"failed: {first[1].failed}")
