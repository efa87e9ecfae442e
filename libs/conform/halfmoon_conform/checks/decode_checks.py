"""Check a decode worker: landings, limits, stops, draws, ownership, pages and the end."""

import asyncio
from typing import Any

from halfmoon_conform.blocks import block_bytes
from halfmoon_conform.check import ServiceRole, check
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.decode_client import GREEDY, DecodeClient, make_kv
from halfmoon_conform.peers.caller import is_draining_welcome
from halfmoon_conform.verdict import CheckFailed, CheckSkipped, require
from halfmoon_protocol.blocks import block_hashes

_DECODE: tuple[ServiceRole, ...] = ("decode",)
#: Requests that are cancelled in turn, until one is cut short.
_CANCELS = 5
#: Statuses of an access by a key that is over, or for other bytes.
_VOID = (1, 2, 11)
_KEY = (
    "The key in the landing's region may be for this landing alone: for writes to its pages,"
    " those of held blocks excepted, and until it is started, cancelled or out of time."
)


async def _two_keys(client: DecodeClient) -> None:
    """Skip the check where landings have the pool's own key."""
    keys = []
    for _ in range(2):
        answer = await client.landing(1)
        keys.append(answer["landing"]["region"]["key"])
        await client.caller.send({"type": "cancel", "request_id": answer["request_id"]})
    if keys[0] == keys[1]:
        raise CheckSkipped("its landings have no keys of their own")


def _prompt(context: CheckContext) -> tuple[int, list[bytes]]:
    """Return a prompt's length, of two blocks and a half, and its KV."""
    size = context.layout["block_size"]
    n_tokens = 2 * size + size // 2
    return n_tokens, make_kv(context.chance, context.layout, n_tokens)


async def _loads(context: CheckContext, holds: Any, what: str) -> None:
    listener = await context.listen()
    await listener.wait_for(lambda: bool(listener.loads) and holds(listener.loads[-1]), what)


# -- landings --------------------------------------------------------------------------------------


@check(
    "decode.landing.shape",
    roles=_DECODE,
    says="The landing: region, pages, layout, how long it is held, and `n_held_blocks`.",
)
async def _shape(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    size = context.layout["block_size"]
    for n_tokens in (1, size - 1, size, size + 1, 3 * size):
        answer = await client.landing(n_tokens)
        landing = answer["landing"]
        pages = landing["pages"]
        require(landing["layout"] == context.layout, "its layout is not that of the record")
        require(len(pages) == -(-n_tokens // size), f"{len(pages)} pages for {n_tokens} tokens")
        require(len(set(pages)) == len(pages), "a page twice in a landing")
        end = (max(pages) + 1) * block_bytes(context.layout)
        require(end <= landing["region"]["length"], "a page behind the region's end")
        require(answer["expires_s"] > 0, "held for no time")
        require(answer.get("n_held_blocks", 0) == 0, "held blocks without hashes")


@check(
    "decode.landing.pages-are-its-own", roles=_DECODE, says="Set pages aside for so many tokens."
)
async def _own_pages(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    answers = [await client.landing(context.layout["block_size"] + 1) for _ in range(4)]
    pages = [page for answer in answers for page in answer["landing"]["pages"]]
    require(len(set(pages)) == len(pages), "two landings share a page")


@check("decode.landing.duplicate", roles=_DECODE, says="dropped, the first one stands")
async def _duplicate_reserve(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    first = await client.landing(n_tokens)
    again = {
        "type": "reserve_decode",
        "request_id": first["request_id"],
        "n_tokens": 1,
        "stopping": {"max_new_tokens": 1},
    }
    await client.caller.send(again)
    await client.caller.expect_none({"request_id": first["request_id"]})
    require(not any(await client.write(first["landing"], kv)), "the first landing is gone")
    await client.start(first["request_id"], n_prompt=n_tokens)
    answer = await client.answer(first["request_id"])
    require(answer.finish == "length", f"the first one did not stand: {answer.failed}")


@check(
    "decode.landing.foreign-id", roles=_DECODE, says="`decode_refused`, retryable: the id is in use"
)
async def _foreign_reserve(context: CheckContext) -> None:
    one, other = await DecodeClient.open(context), await DecodeClient.open(context)
    held = await one.landing(4)
    answer = await other.reserve(4, request_id=held["request_id"])
    require(answer["type"] == "decode_refused", f"answered {answer['type']}")
    require(answer["retryable"] is True, "not retryable")


@check(
    "decode.landing.too-long",
    roles=_DECODE,
    says="No room now (`retryable`), or never. Nothing is held.",
)
async def _too_long(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    longest = context.subject.record.get("max_context", 0)
    if not longest:
        raise CheckSkipped("its record has no max_context")
    for n_tokens, more in ((longest + 1, 1), (longest - 1, 8), (2**40, 1)):
        answer = await client.reserve(n_tokens, more)
        require(answer["type"] == "decode_refused", f"reserved {n_tokens} and {more} more tokens")
        require(answer["retryable"] is False, "retryable, and no wait can help")
        require(answer["reason"], "refused without a reason")


@check(
    "decode.landing.no-room",
    roles=_DECODE,
    needs="alone",
    says="No room now (`retryable`), or never. Nothing is held.",
)
async def _no_room(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    listener = await context.listen()
    await listener.wait_for(lambda: bool(listener.loads), "load")
    n_pages = listener.loads[-1]["n_pages"]
    held = []
    longest = context.subject.record.get("max_context", 64) - 8
    n_tokens = min(longest, max(1, n_pages // 8) * context.layout["block_size"])
    for _ in range(2000):
        answer = await client.reserve(n_tokens)
        if answer["type"] == "decode_refused":
            require(answer["retryable"] is True, f"never has room: {answer['reason']}")
            require(answer.get("retry_after_s", 1.0) > 0, "refused without a time to ask again")
            break
        held.append(answer["request_id"])
    else:
        raise CheckSkipped("its memory holds more landings than the kit asks for")
    require(held, "refused the first landing")
    await client.caller.send({"type": "cancel", "request_id": held[0]})
    answer = await client.reserve(n_tokens)
    require(answer["type"] == "decode_reserved", "no room after a cancel freed it")


@check("decode.landing.key-is-for-writes", roles=_DECODE, says=_KEY)
async def _key_writes(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    await _two_keys(client)
    answer = await client.landing(context.layout["block_size"])
    region, size = answer["landing"]["region"], block_bytes(context.layout)
    connection = await context.dial(region)
    place = answer["landing"]["pages"][0] * size
    ((status, _),) = await connection.read_bytes(region, [(place, 16)])
    require(status in _VOID, f"a read by a landing's key has the status {status}")


@check("decode.landing.key-opens-its-pages-alone", roles=_DECODE, says=_KEY)
async def _key_pages(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    await _two_keys(client)
    size = block_bytes(context.layout)
    one, other = [await client.landing(1) for _ in range(2)]
    region, page = one["landing"]["region"], other["landing"]["pages"][0]
    connection = await context.dial(region)
    own_end = (one["landing"]["pages"][0] + 1) * size
    for offset, n in ((page * size, 16), (own_end - 8, 16), (own_end, 1)):
        (status,) = await connection.write_bytes(region, [(offset, bytes(n))])
        require(status in _VOID, f"a write beside the landing's pages has the status {status}")


@check("decode.landing.key-ends-with-start", roles=_DECODE, says=_KEY)
async def _key_ends_with_start(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    await _two_keys(client)
    n_tokens, kv = _prompt(context)
    answer = await client.landing(n_tokens, 64)
    await client.write(answer["landing"], kv)
    await client.start(answer["request_id"], n_prompt=n_tokens, max_new_tokens=64)
    await client.answer(answer["request_id"], n_tokens=1)
    statuses = await client.write(answer["landing"], kv)
    require(all(s in _VOID for s in statuses), f"writes after the start: statuses {statuses}")


@check("decode.landing.key-ends-with-cancel", roles=_DECODE, says=_KEY)
async def _key_ends_with_cancel(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    await _two_keys(client)
    n_tokens, kv = _prompt(context)
    answer = await client.landing(n_tokens)
    await client.caller.send({"type": "cancel", "request_id": answer["request_id"]})
    await client.caller.settle()
    statuses = await client.write(answer["landing"], kv)
    require(all(s in _VOID for s in statuses), f"writes after a cancel: statuses {statuses}")


@check(
    "decode.landing.runs-out",
    roles=_DECODE,
    says="Decode holds the pages from `decode_reserved` on, for `expires_s` at the most.",
)
async def _runs_out(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    answer = await client.landing(4)
    if answer["expires_s"] > 30:
        raise CheckSkipped(
            f"it holds landings for {answer['expires_s']:g} s: start it with 30 s at the most"
        )
    failed = await client.caller.take(
        lambda m: m.get("request_id") == answer["request_id"], "its end", answer["expires_s"] + 10
    )
    require(failed["type"] == "decode_failed", f"a landing ran out, and it sent {failed['type']}")
    require(failed["retryable"] is True, "not retryable")
    await client.start(answer["request_id"])
    late = await client.answer(answer["request_id"])
    require(late.failed is not None, "started a landing that ran out")


@check(
    "decode.landing.old-generation",
    roles=_DECODE,
    needs="killable",
    says="Over TCP the owner checks key, generation and bounds on every access.",
)
async def _old_generation(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    answer = await client.landing(n_tokens)
    await context.subject.kill()
    await context.subject.restart()
    try:
        statuses = await client.write(answer["landing"], kv)
    except CheckFailed as refused:
        require(str(refused).startswith("refused the hello"), str(refused))
    else:
        require(all(statuses), "a write into a landing of the process before was let in")


# -- tokens ----------------------------------------------------------------------------------------


@check(
    "decode.tokens.limit",
    roles=_DECODE,
    says="So a try ends after `max_new_tokens` tokens of its own, which begin behind `token_ids`",
)
async def _limit(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    for limit in (2, 3, 9):
        answer = await client.run(kv, n_tokens, limit)
        require(
            (len(answer.tokens), answer.finish) == (limit - 1, "length"),
            f"{len(answer.tokens)} tokens, finish {answer.finish!r}, behind a first token of"
            f" {limit}"
            f" in all: {answer.failed}",
        )


@check(
    "decode.tokens.limit-of-a-later-try",
    roles=_DECODE,
    says="never count from `n_prompt`, or answers are cut short by k.",
)
async def _later_try(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    answer = await client.run(kv, n_tokens, 6, n_prompt=n_tokens - 4)
    require(
        (len(answer.tokens), answer.finish) == (5, "length"),
        f"{len(answer.tokens)} tokens of 5, with 4 tokens of an earlier try in the prompt",
    )


@check(
    "decode.tokens.same-kv-same-tokens",
    roles=_DECODE,
    says="The KV has landed; go on after this first token, until the `stopping` of the"
    " reservation.",
)
async def _same_kv(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    one = await client.run(kv, n_tokens, 12)
    other = await client.run(kv, n_tokens, 12)
    require(one.tokens == other.tokens, f"{one.tokens} and then {other.tokens} for the same KV")


@check(
    "decode.tokens.depend-on-the-kv",
    roles=_DECODE,
    features=("logprobs",),
    says="The KV has landed; go on after this first token, until the `stopping` of the"
    " reservation.",
)
async def _kv_matters(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    size = context.layout["block_size"]
    found = []
    for _ in range(4):
        kv = make_kv(context.chance, context.layout, 2 * size)
        found.append(await _scored(client, kv, 2 * size))
    require(
        any(each != found[0] for each in found),
        "four prompts with other KV have the same tokens and scores: it reads other memory",
    )


async def _scored(client: DecodeClient, kv: list[bytes], n_tokens: int) -> tuple[list[int], Any]:
    """Run a request, and return its tokens and scores: these show any change of its KV."""
    answer = await client.run(kv, n_tokens, 8, sampling={**GREEDY, "logprobs": 1})
    return answer.tokens, answer.scores


@check(
    "decode.tokens.each-page-counts",
    roles=_DECODE,
    features=("logprobs",),
    says="Page `p` of a pool begins at byte `p · block_bytes` of its region.",
)
async def _each_page(context: CheckContext) -> None:
    """Write two blocks in one order and the other: the pages' order is the prompt's."""
    client = await DecodeClient.open(context)
    size = context.layout["block_size"]
    kv = make_kv(context.chance, context.layout, 2 * size)
    others = [make_kv(context.chance, context.layout, 2 * size) for _ in range(3)]
    plain = await _scored(client, kv, 2 * size)
    changed = [
        await _scored(client, each, 2 * size)
        for other in others
        for each in ([other[0], kv[1]], [kv[0], other[1]])
    ]
    for which in (0, 1):
        same = all(answer == plain for answer in changed[which::2])
        require(not same, f"block {which} of a prompt has no influence on its tokens")


@check(
    "decode.tokens.draws-repeat",
    roles=_DECODE,
    features=("sampling",),
    says="`sampling`, its seed included",
)
async def _draws(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    drawn = []
    for seed in (7, 7, 8, 9, 10, 11):
        sampling = {"temperature": 100.0, "seed": seed}
        drawn.append((await client.run(kv, n_tokens, 16, sampling=sampling)).tokens)
    require(drawn[0] == drawn[1], f"the same seed drew {drawn[0]} and then {drawn[1]}")
    require(any(each != drawn[0] for each in drawn[2:]), "five seeds drew the same 15 tokens")


@check(
    "decode.tokens.draws-beside-others",
    roles=_DECODE,
    features=("sampling",),
    says="and never another connection's request",
)
async def _draws_beside(context: CheckContext) -> None:
    """Draw alone and in a batch: the draw depends on the request, not on its neighbours."""
    client = await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    sampling = {"temperature": 0.7, "seed": 5}
    alone = await client.run(kv, n_tokens, 10, sampling=sampling)
    others = [await DecodeClient.open(context) for _ in range(3)]
    answers = await asyncio.gather(
        client.run(kv, n_tokens, 10, sampling=sampling),
        *(
            other.run(
                make_kv(context.chance, context.layout, n_tokens),
                n_tokens,
                10,
                sampling={"temperature": 0.7, "seed": 6 + i},
            )
            for i, other in enumerate(others)
        ),
    )
    require(all(answer.finish == "length" for answer in answers), "a request did not end by length")
    require(
        answers[0].tokens == alone.tokens, f"{answers[0].tokens} in a batch, {alone.tokens} alone"
    )


@check(
    "decode.tokens.stop",
    roles=_DECODE,
    says='`finish` is "", "stop" or "length".',
)
async def _stop(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    whole = await client.run(kv, n_tokens, 12)
    stop = whole.tokens[4]
    wanted = whole.tokens[: whole.tokens.index(stop) + 1]
    answer = await client.run(kv, n_tokens, 12, stopping={"stop_token_ids": [stop, 2**31]})
    require(
        (answer.tokens, answer.finish) == (wanted, "stop"),
        f"{answer.tokens}, finish {answer.finish!r}; the stop token is {stop}, of {whole.tokens}",
    )


@check(
    "decode.tokens.min-new-tokens",
    roles=_DECODE,
    features=("min_tokens",),
    says="Of the first `min_new_tokens` tokens none is a stop token",
)
async def _min_new(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    whole = await client.run(kv, n_tokens, 12)
    stops = sorted(set(whole.tokens))
    stopping = {"stop_token_ids": stops, "min_new_tokens": 5}
    answer = await client.run(kv, n_tokens, 12, stopping=stopping)
    early = answer.tokens[:4]
    require(
        len(early) == 4 and not set(early) & set(stops),
        f"{early} after the first token, with min_new_tokens 5; the stop tokens are {stops}",
    )


@check(
    "decode.tokens.scores",
    roles=_DECODE,
    features=("logprobs",),
    says="With log probabilities where a request asks for them.",
)
async def _scores(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    answer = await client.run(kv, n_tokens, 6, sampling={**GREEDY, "logprobs": 2})
    n_scores, n_produced = len(answer.scores), len(answer.tokens)
    require(n_scores == n_produced, f"{n_scores} scores of {n_produced} tokens")
    plain = await client.run(kv, n_tokens, 6)
    require(not plain.scores, "scores, and the request asks for none")
    require(plain.tokens == answer.tokens, "other tokens because of the scores")


@check(
    "decode.tokens.steps-rise",
    roles=_DECODE,
    says="`step` of `tokens_produced` rises with each message to a conductor; 0 is not numbered and"
    " not compared.",
)
async def _steps(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    answers = [await client.run(kv, n_tokens, 8) for _ in range(2)]
    steps = [step for answer in answers for step in answer.steps if step]
    require(steps == sorted(set(steps)), f"steps {steps} do not rise")


@check(
    "decode.tokens.of-own-requests",
    roles=_DECODE,
    says="One step's tokens, of all of this conductor's requests.",
)
async def _own_tokens(context: CheckContext) -> None:
    clients = [await DecodeClient.open(context) for _ in range(3)]
    n_tokens, kv = _prompt(context)
    landings = []
    for client in clients:
        for _ in range(2):
            reserved = await client.landing(n_tokens, 12)
            await client.write(reserved["landing"], kv)
            landings.append((client, reserved["request_id"]))
    for client, request_id in landings:
        await client.start(request_id, n_prompt=n_tokens, max_new_tokens=12)
    own: dict[int, set[str]] = {}
    for client, request_id in landings:
        own.setdefault(id(client), set()).add(request_id)
    for client, request_id in landings:
        answer = await client.answer(request_id)
        require(answer.finish == "length", f"{request_id} did not end: {answer.failed}")
        require(len(answer.tokens) == 11, f"{len(answer.tokens)} tokens of 11")
    for client in clients:
        for message in client.caller.inbox:
            names = {produced[0] for produced in message.get("produced", [])}
            require(names <= own[id(client)], f"tokens of another connection's {names}")


# -- ownership, order, and what is not right -------------------------------------------------------


@check("decode.start.twice", roles=_DECODE, says="Duplicate* is one said twice.")
async def _start_twice(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    wanted = await client.run(kv, n_tokens, 10)
    reserved = await client.landing(n_tokens, 10)
    await client.write(reserved["landing"], kv)
    await client.start(reserved["request_id"], n_prompt=n_tokens, max_new_tokens=10)
    await client.start(reserved["request_id"], first_token=2, n_prompt=n_tokens, max_new_tokens=10)
    answer = await client.answer(reserved["request_id"])
    require(
        answer.tokens == wanted.tokens, f"{answer.tokens}, and {wanted.tokens} without a duplicate"
    )


@check("decode.start.without-landing", roles=_DECODE, says="`decode_failed`, retryable")
async def _start_without(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    request_id = context.name("never")
    await client.start(request_id)
    answer = await client.answer(request_id)
    require(answer.failed is not None and answer.failed["retryable"] is True, f"{answer}")


@check("decode.start.foreign", roles=_DECODE, says="`decode_failed`, retryable")
async def _start_foreign(context: CheckContext) -> None:
    one, other = await DecodeClient.open(context), await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    reserved = await one.landing(n_tokens)
    await one.write(reserved["landing"], kv)
    await other.start(reserved["request_id"], n_prompt=n_tokens)
    refused = await other.answer(reserved["request_id"])
    require(refused.failed is not None and refused.failed["retryable"] is True, f"{refused}")
    await one.start(reserved["request_id"], n_prompt=n_tokens)
    answer = await one.answer(reserved["request_id"])
    require(answer.finish == "length", f"the owner's request ended by {answer.failed}")


@check(
    "decode.start.absurd",
    roles=_DECODE,
    features=("penalties",),
    says="`decode_failed`; its landing is freed",
)
async def _start_absurd(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    n_tokens, _ = _prompt(context)
    absurd: tuple[dict[str, Any], ...] = (
        {"first_token": 2**32 - 1},
        {"n_prompt": n_tokens + 1},
        {"sampling": {**GREEDY, "repetition_penalty": 1.5}, "history": [1]},
    )
    for more in absurd:
        reserved = await client.landing(n_tokens)
        await client.start(reserved["request_id"], **{"n_prompt": n_tokens, **more})
        answer = await client.answer(reserved["request_id"])
        require(answer.failed is not None, f"took a start with {more}")
        assert answer.failed is not None
        require(answer.failed["retryable"] is False, f"retryable: {answer.failed}")
        require(answer.failed["reason"], "failed without a reason")
        again = await client.reserve(n_tokens, request_id=reserved["request_id"])
        # A duplicate would be dropped. An answer, even that there is no room, is to a new one.
        require(again["type"] in ("decode_reserved", "decode_refused"), "its landing is still held")
        await client.caller.send({"type": "cancel", "request_id": reserved["request_id"]})


@check(
    "decode.cancel.landing", roles=_DECODE, says="Forget a request, free all. Unknown ids are fine."
)
async def _cancel_landing(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    reserved = await client.landing(4)
    await client.caller.send({"type": "cancel", "request_id": reserved["request_id"]})
    await client.caller.expect_none({"request_id": reserved["request_id"]})
    await client.start(reserved["request_id"])
    answer = await client.answer(reserved["request_id"])
    require(answer.failed is not None, "started a request that was cancelled")


@check(
    "decode.cancel.running", roles=_DECODE, says="Forget a request, free all. Unknown ids are fine."
)
async def _cancel_running(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    for _ in range(_CANCELS):
        if await _stops_when_cancelled(client, kv, n_tokens):
            return
    raise CheckFailed(f"{_CANCELS} requests were cancelled, and each of them ran to its end")


async def _stops_when_cancelled(client: DecodeClient, kv: list[bytes], n_tokens: int) -> bool:
    """Cancel a request while it runs; return False if it had its last token all the same.

    Raises:
        CheckFailed: it goes on after its cancel.
    """
    room = client.context.subject.record.get("max_context", 512) - n_tokens
    limit = min(room, 400)
    reserved = await client.landing(n_tokens, limit)
    request_id = reserved["request_id"]
    await client.write(reserved["landing"], kv)
    await client.start(request_id, n_prompt=n_tokens, max_new_tokens=limit)
    await client.answer(request_id, n_tokens=1)
    await client.caller.send({"type": "cancel", "request_id": request_id})
    await client.caller.settle()
    # What was under way may still have come; from now on nothing does.
    again = await client.run(kv, n_tokens, 8)
    while client.has_part_of(request_id):
        if (await client.answer(request_id, n_tokens=1)).finish:
            return False
    other = await client.run(kv, n_tokens, 8)
    require(not client.has_part_of(request_id), "tokens of a cancelled request")
    require(again.tokens == other.tokens, "other tokens after a cancel")
    return True


@check("decode.cancel.foreign", roles=_DECODE, says="*Foreign* is one about something that another")
async def _cancel_foreign(context: CheckContext) -> None:
    one, other = await DecodeClient.open(context), await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    reserved = await one.landing(n_tokens)
    await one.write(reserved["landing"], kv)
    await other.caller.send({"type": "cancel", "request_id": reserved["request_id"]})
    await other.caller.settle()
    await one.start(reserved["request_id"], n_prompt=n_tokens)
    answer = await one.answer(reserved["request_id"])
    require(answer.finish == "length", f"another connection's cancel ended it: {answer.failed}")


@check(
    "decode.connection.gone",
    roles=_DECODE,
    needs="alone",
    says="If it is down, its requests are dropped: that was the same conductor, started again.",
)
async def _connection_gone(context: CheckContext) -> None:
    name = context.name("conductor")
    client = await DecodeClient.open(context, name)
    for _ in range(3):
        await client.landing(4)
    await _loads(context, lambda load: load["n_reserved"] == 3, "load of three landings")
    await client.caller.close()
    await DecodeClient.open(context, name)
    await _loads(context, lambda load: load["n_reserved"] == 0, "load without a lost conductor's")


@check("decode.load.counts", roles=_DECODE, needs="alone", says="How busy it is.")
async def _load_counts(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    listener = await context.listen()
    await listener.wait_for(lambda: bool(listener.loads), "load")
    free = listener.loads[-1]["free_pages"]
    n_pages = listener.loads[-1]["n_pages"]
    require(0 < free <= n_pages, f"{free} of {n_pages} pages are free")
    require(listener.loads[-1]["n_running"] == 0, "something runs")
    size = context.layout["block_size"]
    reserved = await client.landing(2 * size)

    def counted() -> bool:
        load = listener.loads[-1]
        return bool(load["n_reserved"] == 1 and load["free_pages"] <= free - 2)

    await listener.wait_for(counted, "load of one landing with two pages")
    await client.caller.send({"type": "cancel", "request_id": reserved["request_id"]})

    def freed() -> bool:
        load = listener.loads[-1]
        return bool(load["n_reserved"] == 0 and load["free_pages"] == free)

    await listener.wait_for(freed, "load with all pages free again")


@check(
    "decode.preemption.is-told",
    roles=_DECODE,
    needs="alone",
    says="The request is gone and all it held is free.",
)
async def _preemption(context: CheckContext) -> None:
    """Start more than the pool can hold to the end: each request ends, whole or retryable."""
    client = await DecodeClient.open(context)
    listener = await context.listen()
    await listener.wait_for(lambda: bool(listener.loads), "load")
    n_pages = listener.loads[-1]["n_pages"]
    size, longest = context.layout["block_size"], context.subject.record.get("max_context", 0)
    n_tokens = max(1, min(n_pages // 8, longest // size // 2)) * size - size // 2
    limit = min(longest - n_tokens, 3 * n_tokens)
    if n_pages > 600 or limit < 4:
        raise CheckSkipped(f"its pool of {n_pages} pages is too large for the kit to fill")
    kv = make_kv(context.chance, context.layout, n_tokens)
    running = []
    for _ in range(32):
        reserved = await client.reserve(n_tokens, limit)
        if reserved["type"] != "decode_reserved":
            break
        await client.write(reserved["landing"], kv)
        running.append(reserved["request_id"])
    for request_id in running:
        await client.start(request_id, n_prompt=n_tokens, max_new_tokens=limit)
    answers = [await client.answer(request_id) for request_id in running]
    whole = [answer for answer in answers if answer.failed is None]
    require(whole, "no request ended: each was given up for another")
    for answer in whole:
        require(len(answer.tokens) == limit - 1, f"{len(answer.tokens)} tokens of {limit - 1}")
        require(answer.tokens == whole[0].tokens, "the same KV has other tokens beside others")
    for answer in answers:
        if answer.failed is not None:
            require(answer.failed["retryable"] is True, f"not retryable: {answer.failed}")
            n = len(answer.tokens)
            require(answer.tokens == whole[0].tokens[:n], "wrong tokens before it was given up")
    await listener.wait_for(
        lambda: (
            listener.loads[-1]["n_running"] == 0 and listener.loads[-1]["free_pages"] == n_pages
        ),
        "load with all pages free after the last request",
    )


@check(
    "decode.hashes.more-than-blocks",
    roles=_DECODE,
    claims=("keeps_pages",),
    says="More hashes than full blocks are `decode_refused`.",
)
async def _more_hashes(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    chain = context.blocks(3)
    answer = await client.reserve(2 * context.layout["block_size"], block_hashes=chain.hashes)
    require(answer["type"] == "decode_refused", "took three hashes for two full blocks")
    require(answer["retryable"] is False, "retryable, and no wait can help")


@check(
    "decode.hashes.held-blocks",
    roles=_DECODE,
    claims=("keeps_pages",),
    says="The block with the prompt's last token is never among them.",
)
async def _held_blocks(context: CheckContext) -> None:
    """Run a prompt with hashes twice: held blocks are named first, are right, and are closed."""
    client = await DecodeClient.open(context)
    size = context.layout["block_size"]
    tokens = [context.chance.randrange(50) for _ in range(3 * size)]
    hashes = block_hashes(tokens, model=context.layout["model"], block_size=size)
    kv = make_kv(context.chance, context.layout, 3 * size)
    found = []
    for _ in range(2):
        reserved = await client.landing(3 * size, 8, block_hashes=[bytes(h) for h in hashes])
        n_held = reserved.get("n_held_blocks", 0)
        require(n_held < 3, f"{n_held} of 3 blocks are held, the last token's among them")
        if n_held:
            # Nothing may write to the pages of held blocks.
            (status,) = await client.write(reserved["landing"], [bytes(len(kv[0]))])
            if reserved["landing"]["region"]["key"]:
                require(status in _VOID, "the key of a landing opens a held block's page")
        statuses = await client.write(reserved["landing"], kv[n_held:], n_held)
        require(not any(statuses), f"writes behind the held blocks: statuses {statuses}")
        await client.start(reserved["request_id"], n_prompt=3 * size)
        found.append((await client.answer(reserved["request_id"])).tokens)
    require(found[0] == found[1], f"{found[0]} with landed blocks, {found[1]} with held ones")


@check(
    "decode.codes.of-refusals",
    roles=_DECODE,
    says="Refusals and failures say in `code` why, for programs; `reason` is for people.",
)
async def _codes(context: CheckContext) -> None:
    client, other = await DecodeClient.open(context), await DecodeClient.open(context)
    held = await client.landing(4)
    found = {"id_in_use": await other.reserve(4, request_id=held["request_id"])}
    if longest := context.subject.record.get("max_context", 0):
        found["too_long"] = await client.reserve(longest + 1)
    request_id = context.name("never")
    await client.start(request_id)
    found["not_held"] = (await client.answer(request_id)).failed or {}
    await client.start(held["request_id"], first_token=2**32 - 1)
    found["invalid"] = (await client.answer(held["request_id"])).failed or {}
    for code, message in found.items():
        require(
            message.get("code") == code, f"code {message.get('code')!r}, not {code!r}: {message}"
        )


@check(
    "decode.stopping.of-the-reservation",
    roles=_DECODE,
    claims=("features",),
    says="`stopping` is said to prefill in `start_prefill`, which may end with the first token,"
    " and to decode in `reserve_decode`, once.",
)
async def _stopping_once(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    answer = await client.run(kv, n_tokens, 5)
    require((len(answer.tokens), answer.finish) == (4, "length"), f"{answer}")


# -- the end ---------------------------------------------------------------------------------------


@check(
    "decode.drain.finishes",
    roles=_DECODE,
    needs="killable",
    says="Workers that are draining refuse `reserve_decode`, `start_prefill`, `reserve_blocks` and"
    " `replicate_blocks`, so that the conductor asks another one.",
)
async def _drain(context: CheckContext) -> None:
    client = await DecodeClient.open(context)
    n_tokens, kv = _prompt(context)
    reserved = await client.landing(n_tokens, 8)
    await client.write(reserved["landing"], kv)
    await context.renewed()
    await context.subject.ask_to_stop()
    await client.caller.take(is_draining_welcome, "a welcome that says draining")
    refused = await client.reserve(4)
    require(refused["type"] == "decode_refused", "took a new request while draining")
    require(refused["retryable"] is True, "not retryable")
    await client.start(reserved["request_id"], n_prompt=n_tokens)
    answer = await client.answer(reserved["request_id"])
    require(answer.finish == "length", f"did not finish what it had: {answer.failed}")

    async def stopped() -> bool:
        process = context.subject.process
        return process is not None and not process.running

    await context.until(stopped, "it ends when it has nothing left", 40)


@check(
    "decode.unwelcome.stops",
    roles=("decode", "prefill"),
    needs="killable",
    says="A prefill or decode worker stops when no conductor uses it.",
)
async def _unwelcome(context: CheckContext) -> None:
    one, other = await context.connect(), await context.connect()
    await one.send({"type": "unwelcome", "reason": "conformance"})
    await one.settle()
    await other.settle()
    process = context.subject.process
    require(process is not None and process.running, "stopped, though a conductor uses it")
    await one.send({"type": "unwelcome", "reason": "conformance"})
    await other.send({"type": "unwelcome", "reason": "conformance"})

    async def stopped() -> bool:
        return process is not None and not process.running

    await context.until(stopped, "it stops when no conductor uses it", 40)
