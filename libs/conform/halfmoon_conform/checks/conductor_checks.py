"""Check a conductor: hashes, landings, the order of cancels, tries, KV events, and odd workers."""

import asyncio
import contextlib
from typing import Any

from halfmoon_conform.check import ServiceRole, check
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.peers.openai_client import HttpStream
from halfmoon_conform.peers.wire_maps import WireMap
from halfmoon_conform.played_cluster import (
    LANDING_S,
    LAYOUT,
    PlayedCluster,
    PlayedWorker,
    token_at,
)
from halfmoon_conform.verdict import CheckFailed, require
from halfmoon_protocol.blocks import block_hashes

_CONDUCTOR: tuple[ServiceRole, ...] = ("conductor",)
_CANCEL_ORDER = (
    "So a conductor that gives a request up during prefill cancels *prefill*, waits for one of"
    " those three, and only then cancels decode."
)
_TRIES = "What the client has by then is part of the new try's prompt, and its fields count so:"


async def _never(_: bytes, __: WireMap) -> bool:
    """Leave a message without an answer."""
    return True


async def _hang_up_in_prefill(cluster: PlayedCluster) -> tuple[HttpStream, str]:
    """Start a request whose prefill does not end, and hang up; return its id."""
    (prefill,) = cluster.of("prefill")
    prefill.instead["start_prefill"] = _never
    body = cluster.body(cluster.prompt(), 8, stream=True)
    opening = asyncio.create_task(HttpStream.open(cluster.url, "POST", "/v1/completions", body))
    _, start = await prefill.port.expect({"type": "start_prefill"})
    opening.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await opening
    return start["request_id"], start["request_id"]


# -- a request -------------------------------------------------------------------------------------


@check(
    "conductor.hello.first",
    roles=_CONDUCTOR,
    needs="alone",
    says="A conductor's first message on a connection is `hello`",
)
async def _hello_first(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context, kvstore=1)
    await cluster.text(cluster.prompt())
    for worker in cluster.workers:
        for kinds in worker.order.values():
            require(kinds[0] == "hello", f"the first message to {worker.name} is {kinds[0]}")


@check(
    "conductor.request.fields",
    roles=_CONDUCTOR,
    needs="alone",
    says="`token_ids`, and `n_tokens` of `reserve_decode` | the client's prompt",
)
async def _fields(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    prompt = cluster.prompt(40)
    await cluster.text(prompt, 8, seed=11, temperature=0.5)
    (prefill,), (decode,) = cluster.of("prefill"), cluster.of("decode")
    _, reserve = await decode.port.expect({"type": "reserve_decode"})
    require(reserve["n_tokens"] == 40, f"n_tokens of reserve_decode is {reserve['n_tokens']}")
    require(reserve["stopping"]["max_new_tokens"] == 8, f"{reserve['stopping']}")
    _, start = await prefill.port.expect({"type": "start_prefill"})
    require(start["token_ids"] == prompt, "token_ids are not the client's prompt")
    require(start["n_prompt"] == 40, f"n_prompt is {start['n_prompt']}")
    require(start["stopping"]["max_new_tokens"] == 8, f"{start['stopping']}")
    _, begun = await decode.port.expect({"type": "start_decode"})
    require(begun["n_prompt"] == 40, f"n_prompt of start_decode is {begun['n_prompt']}")
    require(begun["first_token"] == token_at(40), "first_token is not prefill's")
    for message in (start, begun):
        sampling = message["sampling"]
        require(
            (sampling.get("temperature"), sampling.get("seed")) == (0.5, 11),
            f"the sampling of {message['type']} is {sampling}",
        )


@check(
    "conductor.request.hashes",
    roles=_CONDUCTOR,
    needs="alone",
    says="A prompt is cut into blocks of `block_size` tokens (16 to 512). A last block that is"
    " not full has no hash.",
)
async def _hashes(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    prompt = cluster.prompt(3 * 16 + 5)
    await cluster.text(prompt)
    _, start = await cluster.of("prefill")[0].port.expect({"type": "start_prefill"})
    wanted = block_hashes(prompt, model=LAYOUT["model"], block_size=16)
    require(
        [bytes(each) for each in start["block_hashes"]] == [bytes(each) for each in wanted],
        "block_hashes are not the chained hashes of the prompt's full blocks",
    )


@check(
    "conductor.request.landing",
    roles=_CONDUCTOR,
    needs="alone",
    says="The conductor passes them on with a shorter time, `landing_expires_s` (less five"
    " seconds, or half of it).",
)
async def _landing(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    (prefill,), (decode,) = cluster.of("prefill"), cluster.of("decode")
    sent: list[WireMap] = []

    async def reserve(caller: bytes, message: WireMap) -> bool:
        sent.append(decode.landing(message))
        decode.reserved[message["request_id"]] = (
            message["n_tokens"],
            message["stopping"]["max_new_tokens"],
        )
        await decode.port.send(caller, sent[-1])
        return True

    decode.instead["reserve_decode"] = reserve
    await cluster.text(cluster.prompt())
    _, start = await prefill.port.expect({"type": "start_prefill"})
    require(start["landing"] == sent[-1]["landing"], "passed on another landing than it was given")
    left = start["landing_expires_s"]
    require(0 < left <= LANDING_S - 5, f"landing_expires_s is {left} of {LANDING_S} s")


@check(
    "conductor.request.reserves-first",
    roles=_CONDUCTOR,
    needs="alone",
    says="Set pages aside for so many tokens.",
)
async def _reserves_first(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    (prefill,), (decode,) = cluster.of("prefill"), cluster.of("decode")
    await cluster.text(cluster.prompt())
    decode.instead["reserve_decode"] = _never
    decode.port.inbox.clear()
    prefill.port.inbox.clear()
    asking = asyncio.create_task(cluster.stream(cluster.prompt()))
    caller, message = await decode.port.expect({"type": "reserve_decode"})
    early = prefill.port.has_received(
        {"type": "start_prefill", "request_id": message["request_id"]}
    )
    require(not early, "asked prefill for a landing that it did not have")
    await decode._on_reserve_decode(caller, message)
    await prefill.port.expect({"type": "start_prefill", "request_id": message["request_id"]})
    await (await asking).answer()


@check(
    "conductor.request.stream",
    roles=_CONDUCTOR,
    needs="alone",
    says="One step's tokens, of all of this conductor's requests.",
)
async def _stream(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    prompt = cluster.prompt()
    whole = await cluster.text(prompt, 12)
    stream = await cluster.stream(prompt, 12)
    parts, finish = [], None
    async for event in stream.events():
        for choice in event.get("choices", ()):
            parts.append(choice["text"])
            finish = choice.get("finish_reason") or finish
    require("".join(parts) == whole, f"streamed {parts}, which is not {whole!r}")
    require(finish == "length", f"finish_reason is {finish!r}")


@check(
    "conductor.request.one-token",
    roles=_CONDUCTOR,
    needs="alone",
    says="Has the token, durations",
)
async def _one_token(context: CheckContext) -> None:
    """Finish with prefill's token: decode is not started, and gets its pages back."""
    cluster = await PlayedCluster.open(context)
    await cluster.text(cluster.prompt(), 1)
    (decode,) = cluster.of("decode")
    await decode.port.expect({"type": "cancel"})
    require(not decode.port.has_received({"type": "start_decode"}), "started a finished request")


# -- cancels ---------------------------------------------------------------------------------------


@check("conductor.cancel.order", roles=_CONDUCTOR, needs="alone", says=_CANCEL_ORDER)
async def _cancel_order(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    (prefill,), (decode,) = cluster.of("prefill"), cluster.of("decode")
    await cluster.text(cluster.prompt())
    prefill.port.inbox.clear()
    prefill.instead["cancel"] = _never
    _, request_id = await _hang_up_in_prefill(cluster)
    caller, _ = await prefill.port.expect({"type": "cancel", "request_id": request_id})
    await asyncio.sleep(0.5)
    early = decode.port.has_received({"type": "cancel", "request_id": request_id})
    require(not early, "cancelled decode before prefill had stopped")
    await prefill.port.send(caller, {"type": "prefill_stopped", "request_id": request_id})
    _, cancel = await decode.port.expect({"type": "cancel", "request_id": request_id})
    require(not cancel.get("landing_in_doubt"), "in doubt, though prefill has stopped")


@check(
    "conductor.cancel.silent-prefill",
    roles=_CONDUCTOR,
    needs="alone",
    says="When prefill can't be asked (it is lost, or silent for five seconds; or a further"
    " stage of its group is lost), decode is cancelled with `landing_in_doubt`.",
)
async def _silent_prefill(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    (prefill,), (decode,) = cluster.of("prefill"), cluster.of("decode")
    await cluster.text(cluster.prompt())
    prefill.port.inbox.clear()
    prefill.instead["cancel"] = _never
    _, request_id = await _hang_up_in_prefill(cluster)
    await prefill.port.expect({"type": "cancel", "request_id": request_id})
    _, cancel = await decode.port.expect({"type": "cancel", "request_id": request_id})
    require(cancel.get("landing_in_doubt") is True, "not in doubt, though prefill was silent")


@check(
    "conductor.cancel.while-it-decodes",
    roles=_CONDUCTOR,
    needs="alone",
    says="Forget a request, free all. Unknown ids are fine.",
)
async def _cancel_decoding(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    (decode,) = cluster.of("decode")
    await cluster.text(cluster.prompt())
    decode.port.inbox.clear()
    decode.stops_after = 2
    stream = await cluster.stream(cluster.prompt(), 64)
    async for _ in stream.events():
        break
    _, start = await decode.port.expect({"type": "start_decode"})
    await stream.close()
    await decode.port.expect({"type": "cancel", "request_id": start["request_id"]})


# -- tries -----------------------------------------------------------------------------------------


async def _retried(context: CheckContext, fail: Any) -> None:
    """Let decode fail after five tokens: the answer goes on without a repeat or a gap."""
    cluster = await PlayedCluster.open(context, decode=2)
    prompt = cluster.prompt(40)
    whole = await cluster.text(prompt, 16)
    for decode in cluster.of("decode"):
        decode.port.inbox.clear()
        decode.instead["start_decode"] = fail(cluster, decode)
    (prefill,) = cluster.of("prefill")
    prefill.port.inbox.clear()
    text = await cluster.text(prompt, 16)
    require(text == whole, f"{text!r} after a lost worker, {whole!r} without")
    _, first = await prefill.port.expect({"type": "start_prefill"})
    _, later = await prefill.port.expect({"type": "start_prefill"})
    require(later["request_id"] == f"{first['request_id']}~2", f"the try is {later['request_id']}")
    k = len(later["token_ids"]) - 40
    wanted = [*prompt, *(token_at(40 + i) for i in range(k))]
    require(k > 0, "the new try's prompt has none of the delivered tokens")
    require(later["token_ids"] == wanted, "its prompt is not the old one and what was delivered")
    require(later["n_prompt"] == 40, f"n_prompt of the new try is {later['n_prompt']}")
    left = later["stopping"]["max_new_tokens"]
    require(left == 16 - k, f"max_new_tokens of the new try is {left}, with {k} of 16 delivered")


@check("conductor.retry.decode-failed", roles=_CONDUCTOR, needs="alone", says=_TRIES)
async def _decode_failed(context: CheckContext) -> None:
    failed: list[str] = []

    def fail(_: PlayedCluster, decode: PlayedWorker) -> Any:
        async def start(caller: bytes, message: WireMap) -> bool:
            if failed:
                return False
            failed.append(decode.name)
            decode.stops_after = 5
            await decode._on_start_decode(caller, message)
            decode.stops_after = None
            await decode.port.send(
                caller,
                {
                    "type": "decode_failed",
                    "request_id": message["request_id"],
                    "reason": "conformance",
                    "retryable": True,
                },
            )
            return True

        return start

    await _retried(context, fail)


@check(
    "conductor.retry.decode-lost",
    roles=_CONDUCTOR,
    needs="alone",
    says="A request whose worker is lost, or that a worker had to give up, is tried again under the"
    " next id.",
)
async def _decode_lost(context: CheckContext) -> None:
    failed: list[str] = []

    def fail(cluster: PlayedCluster, decode: PlayedWorker) -> Any:
        async def start(caller: bytes, message: WireMap) -> bool:
            if failed:
                return False
            failed.append(decode.name)
            decode.stops_after = 5
            await decode._on_start_decode(caller, message)
            gone = asyncio.create_task(cluster.leave(decode))
            cluster.context.on_end(lambda: asyncio.wait_for(gone, 10))
            return True

        return start

    await _retried(context, fail)


@check(
    "conductor.retry.prefill-failed",
    roles=_CONDUCTOR,
    needs="alone",
    says="A request whose worker is lost, or that a worker had to give up, is tried again under the"
    " next id.",
)
async def _prefill_failed(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    (prefill,) = cluster.of("prefill")
    prompt = cluster.prompt()
    whole = await cluster.text(prompt)
    failed: list[str] = []

    async def start(caller: bytes, message: WireMap) -> bool:
        if failed:
            return False
        failed.append(message["request_id"])
        await prefill.port.send(caller, _failure(message, retryable=True))
        return True

    prefill.instead["start_prefill"] = start
    require(await cluster.text(prompt) == whole, "another answer after a failed prefill")
    later = prefill.port.received[-1]
    require(later["request_id"] == f"{failed[0]}~2", f"the new try is {later['request_id']}")


def _failure(message: WireMap, **more: Any) -> WireMap:
    return {
        "type": "prefill_failed",
        "request_id": message["request_id"],
        "reason": "conformance",
        **more,
    }


@check(
    "conductor.retry.four-tries",
    roles=_CONDUCTOR,
    needs="alone",
    says="After four tries in a row that brought no token, the request ends with an error.",
)
async def _four_tries(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    (prefill,) = cluster.of("prefill")
    await cluster.text(cluster.prompt())
    asked: list[str] = []

    async def start(caller: bytes, message: WireMap) -> bool:
        asked.append(message["request_id"])
        await prefill.port.send(caller, _failure(message, retryable=True))
        return True

    prefill.instead["start_prefill"] = start
    answer = await cluster.complete(cluster.prompt())
    require(answer.status >= 500, f"answered {answer.status} when every try failed")
    require(len(asked) == 4, f"{len(asked)} tries: {asked}")


@check(
    "conductor.retry.invalid-is-not-tried-again",
    roles=_CONDUCTOR,
    needs="alone",
    says="`invalid`: the request is at fault, no new try.",
)
async def _invalid(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    (prefill,) = cluster.of("prefill")
    await cluster.text(cluster.prompt())
    asked: list[str] = []

    async def start(caller: bytes, message: WireMap) -> bool:
        asked.append(message["request_id"])
        await prefill.port.send(caller, _failure(message, retryable=False, invalid=True))
        return True

    prefill.instead["start_prefill"] = start
    answer = await cluster.complete(cluster.prompt())
    require(400 <= answer.status < 500, f"answered {answer.status} to a request at fault")
    require(len(asked) == 1, f"{len(asked)} tries of a request at fault")


@check(
    "conductor.retry.refused-landing",
    roles=_CONDUCTOR,
    needs="alone",
    says="No room now (`retryable`), or never. Nothing is held.",
)
async def _refused_landing(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context, decode=2)
    await cluster.text(cluster.prompt())
    refused: list[str] = []
    for decode in cluster.of("decode"):

        async def reserve(caller: bytes, message: WireMap, decode: PlayedWorker = decode) -> bool:
            if refused:
                return False
            refused.append(decode.name)
            await decode.port.send(
                caller,
                {
                    "type": "decode_refused",
                    "request_id": message["request_id"],
                    "reason": "conformance",
                    "retryable": True,
                    "code": "no_room",
                },
            )
            return True

        decode.instead["reserve_decode"] = reserve
    await cluster.text(cluster.prompt())
    require(refused, "asked no decode worker for a landing")


# -- tokens that are not right ---------------------------------------------------------------------


@check(
    "conductor.tokens.duplicate-step",
    roles=_CONDUCTOR,
    needs="alone",
    says="ignored, by its `step`",
)
async def _duplicate_step(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    (decode,) = cluster.of("decode")
    prompt = cluster.prompt(40)
    whole = await cluster.text(prompt, 8)

    async def start(caller: bytes, message: WireMap) -> bool:
        for i in range(1, 8):
            finish = "length" if i == 7 else ""
            for _ in range(2):
                await decode.produce(
                    caller, message["request_id"], token_at(40 + i), finish, step=1000 + i
                )
        return True

    decode.instead["start_decode"] = start
    require(await cluster.text(prompt, 8) == whole, "delivered tokens of a repeated step")


@check(
    "conductor.tokens.of-another-worker",
    roles=_CONDUCTOR,
    needs="alone",
    says="not delivered; cancelled at its sender",
)
async def _foreign_tokens(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context, decode=2)
    prompt = cluster.prompt(40)
    whole = await cluster.text(prompt, 8)
    one, other = cluster.of("decode")
    for decode, stranger in ((one, other), (other, one)):

        async def start(
            caller: bytes,
            message: WireMap,
            decode: PlayedWorker = decode,
            stranger: PlayedWorker = stranger,
        ) -> bool:
            await stranger.produce(stranger.caller, message["request_id"], 99)
            await stranger.port.expect({"type": "cancel", "request_id": message["request_id"]})
            await decode._on_start_decode(caller, message)
            return True

        decode.instead["start_decode"] = start
    require(await cluster.text(prompt, 8) == whole, "delivered a token of another worker")


@check(
    "conductor.tokens.past-the-last",
    roles=_CONDUCTOR,
    needs="alone",
    says="dropped; past the last token the request is cancelled",
)
async def _past_the_last(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    (decode,) = cluster.of("decode")
    prompt = cluster.prompt(40)
    whole = await cluster.text(prompt, 6)

    async def start(caller: bytes, message: WireMap) -> bool:
        for i in range(1, 10):
            await decode.produce(caller, message["request_id"], token_at(40 + i))
        return True

    decode.instead["start_decode"] = start
    require(await cluster.text(prompt, 6) == whole, "delivered tokens past the last one")
    await decode.port.expect({"type": "cancel"})


@check(
    "conductor.late.reserved",
    roles=_CONDUCTOR,
    needs="alone",
    says="the conductor cancels it",
)
async def _late_reserved(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    (decode,) = cluster.of("decode")
    await cluster.text(cluster.prompt())
    request_id = context.name("never")
    answer = decode.landing({"request_id": request_id, "n_tokens": 16})
    await decode.port.send(decode.caller, answer)
    await decode.port.expect({"type": "cancel", "request_id": request_id})


@check(
    "conductor.garbage.from-workers",
    roles=_CONDUCTOR,
    needs="alone",
    says="One that is longer, of another version, or not a message is counted, logged and"
    " dropped, and the connection goes on.",
)
async def _garbage(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    prompt = cluster.prompt()
    whole = await cluster.text(prompt)
    for worker in cluster.workers:
        for frame in (b"", b"\x01", b"\x01\xc1", b"\x01\x80", b"\x09\x80", bytes(5000)):
            await worker.port.send_frame(worker.caller, frame)
        for message in (
            {"type": "prefill_failed", "request_id": "never", "reason": "", "retryable": True},
            {"type": "decode_failed", "request_id": "never", "reason": "", "retryable": True},
            {"type": "tokens_produced", "step": 1, "produced": [["never", 1, ""]]},
            {"type": "hello", "conductor_id": "x", "session": 1},
        ):
            await worker.port.send(worker.caller, message)
    require(await cluster.text(prompt) == whole, "another answer after garbage")


@check(
    "conductor.welcome.of-another-worker",
    roles=_CONDUCTOR,
    needs="alone",
    says="dropped: a worker speaks for itself alone",
)
async def _impostor(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context, decode=2)
    one, other = cluster.of("decode")
    prompt = cluster.prompt()
    whole = await cluster.text(prompt)
    lie = {**other.record, "draining": True, "generation": 9}
    await one.port.send(one.caller, {"type": "welcome", "worker": lie})
    await one.port.send(one.caller, {"type": "welcome", "worker": {**one.record, "draining": True}})
    await asyncio.sleep(0.3)
    one.port.inbox.clear()
    for _ in range(2):
        require(await cluster.text(prompt) == whole, "no answer from a worker that was slandered")
    require(
        not any(m["type"] == "reserve_decode" for _, m in one.port.inbox), "used a draining one"
    )


# -- workers that do not fit -----------------------------------------------------------------------


@check(
    "conductor.draining.gets-nothing",
    roles=_CONDUCTOR,
    needs="alone",
    says="`draining` is true while a worker finishes what it has and takes nothing new.",
)
async def _draining(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context, prefill=2, decode=2)
    await cluster.text(cluster.prompt())
    leaving = [cluster.of("prefill")[0], cluster.of("decode")[0]]
    for worker in leaving:
        worker.port.record["draining"] = True
        await worker.port.register(context.subject.store)
        await worker.port.send(worker.caller, {"type": "welcome", "worker": worker.record})
    await asyncio.sleep(0.5)
    for worker in leaving:
        worker.port.received.clear()
    for _ in range(6):
        await cluster.text(cluster.prompt())
    for worker in leaving:
        asked = [
            m for m in worker.port.received if m["type"] in ("start_prefill", "reserve_decode")
        ]
        require(not asked, f"gave a new request to draining {worker.name}")


@check(
    "conductor.layout.differs",
    roles=_CONDUCTOR,
    needs="alone",
    says="A conductor refuses a prefill or decode worker whose layout differs from the first"
    " one's, and names both values.",
)
async def _other_layout(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    await cluster.text(cluster.prompt())
    other = await cluster.join("decode", layout={**LAYOUT, "n_layers": 7})
    _, refused = await other.port.expect({"type": "unwelcome"})
    for value in ("7", "2"):
        require(value in refused["reason"], f"does not name {value}: {refused['reason']}")
    for _ in range(3):
        await cluster.text(cluster.prompt())
    require(not other.port.has_received({"type": "reserve_decode"}), "uses it all the same")


@check(
    "conductor.versions.no-common-one",
    roles=_CONDUCTOR,
    needs="alone",
    says="A conductor that gets `wrong_version`, or a record without a common version, sends"
    " `unwelcome` with the code `version_mismatch`.",
)
async def _no_common_version(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    await cluster.text(cluster.prompt())
    other = await cluster.join("decode", min_version=200, max_version=201)
    _, refused = await other.port.expect({"type": "unwelcome"})
    require(refused.get("code") == "version_mismatch", f"its code is {refused.get('code')!r}")
    for _ in range(3):
        await cluster.text(cluster.prompt())
    require(not other.port.has_received({"type": "reserve_decode"}), "uses it all the same")


@check(
    "conductor.versions.wrong-version",
    roles=_CONDUCTOR,
    needs="alone",
    says="A conductor that gets `wrong_version`, or a record without a common version, sends"
    " `unwelcome` with the code `version_mismatch`.",
)
async def _wrong_version(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    await cluster.text(cluster.prompt())
    other = PlayedWorker(context, "decode")

    async def hello(caller: bytes, _: WireMap) -> bool:
        answer = {"type": "wrong_version", "got": 1, "min_version": 2, "max_version": 3}
        await other.port.send(caller, answer)
        return True

    other.instead["hello"] = hello
    context.on_end(lambda: cluster.leave(other))
    await other.port.register(context.subject.store)
    _, refused = await other.port.expect({"type": "unwelcome"})
    require(refused.get("code") == "version_mismatch", f"its code is {refused.get('code')!r}")


@check(
    "conductor.features.none-has-it",
    roles=_CONDUCTOR,
    needs="alone",
    says="If no worker of a role has them, the request is refused with status 400 and the feature's"
    " name.",
)
async def _features(context: CheckContext) -> None:
    cluster = PlayedCluster(context)
    await cluster.join("prefill")
    decode = await cluster.join("decode", features=[])
    await cluster.greeted()
    await cluster.text(cluster.prompt())
    answer = await cluster.complete(cluster.prompt(), temperature=1.0)
    require(
        answer.status == 400, f"answered {answer.status}, and decode only takes greedy requests"
    )
    require(b"sampling" in answer.body, f"does not name the feature: {answer.body[:200]!r}")
    starts = [m for m in decode.port.received if m["type"] == "start_decode"]
    require(len(starts) == 1, "gave the request to a worker without the feature")


@check(
    "conductor.generation.higher-wins",
    roles=_CONDUCTOR,
    needs="alone",
    says="A record of a higher generation wins",
)
async def _generation(context: CheckContext) -> None:
    """Restart decode under its name: the new process is used, and the old one no more."""
    cluster = await PlayedCluster.open(context)
    await cluster.text(cluster.prompt())
    (old,) = cluster.of("decode")
    new = await cluster.join("decode", worker_id=old.name, generation=2)
    await cluster.greeted()

    async def used() -> bool:
        await cluster.text(cluster.prompt())
        return new.port.has_received({"type": "start_decode"})

    await context.until(used, "a request to the new start of a worker")
    old.port.received.clear()
    await cluster.text(cluster.prompt())
    require(not old.port.has_received({"type": "reserve_decode"}), "uses the earlier start too")


@check(
    "conductor.curve.unknown-key",
    roles=_CONDUCTOR,
    needs="alone",
    keyed=True,
    says="It does not dial if it has no such key.",
)
async def _unknown_key(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    other = PlayedWorker(context, "decode")
    other.port.record["key_id"] = "0123456789abcdef"
    context.on_end(lambda: cluster.leave(other))
    await other.port.register(context.subject.store)
    for _ in range(2):  # a conductor that greets later members has seen this one's record
        await cluster.join("decode")
        await cluster.greeted()
    for _ in range(3):
        await cluster.text(cluster.prompt())
    require(not other.port.received, "dialled a worker that serves with a key it does not have")


# -- KV events -------------------------------------------------------------------------------------


async def _stored(
    kvstore: PlayedWorker, prompt: list[int], n_blocks: int, **more: Any
) -> list[bytes]:
    hashes = [
        bytes(each)
        for each in block_hashes(prompt, model=LAYOUT["model"], block_size=LAYOUT["block_size"])
    ][:n_blocks]
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": LAYOUT["block_size"],
        "medium": "CPU",
    }
    await kvstore.publish_event(event, **more)
    return hashes


async def _cached_blocks(cluster: PlayedCluster, prompt: list[int]) -> int:
    """Ask for a prompt, and return how many blocks of it prefill is told to be cached."""
    (prefill,) = cluster.of("prefill")
    prefill.port.inbox.clear()
    await cluster.text(prompt)
    _, start = await prefill.port.expect({"type": "start_prefill"})
    cached = start.get("cached")
    if cached is None:
        return 0
    named = cached["kvstore"]["worker_id"]
    require(named in [worker.name for worker in cluster.of("kvstore")], f"cached names {named}")
    return int(cached["n_blocks"])


@check(
    "conductor.events.cached-prefix",
    roles=_CONDUCTOR,
    needs="alone",
    says="A kvstore publishes what it stores and removes, in vLLM's format",
)
async def _cached_prefix(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context, kvstore=1)
    (kvstore,) = cluster.of("kvstore")
    prompt = cluster.prompt(5 * 16)
    hashes = await _stored(kvstore, prompt, 3)

    async def cached() -> bool:
        return await _cached_blocks(cluster, prompt) == 3

    await context.until(cached, "prefill is told of three cached blocks")
    event = {"type": "BlockRemoved", "block_hashes": hashes[2:], "medium": "CPU"}
    await kvstore.publish_event(event)

    async def fewer() -> bool:
        return await _cached_blocks(cluster, prompt) == 2

    await context.until(fewer, "prefill is told of the two blocks that are left")


@check(
    "conductor.events.gap",
    roles=_CONDUCTOR,
    needs="alone",
    says="A subscriber that sees a gap asks for a snapshot. Then it applies the events after the"
    " snapshot's number.",
)
async def _gap(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context, kvstore=1)
    (kvstore,) = cluster.of("kvstore")
    prompt, other = cluster.prompt(5 * 16), cluster.prompt(5 * 16)
    await _stored(kvstore, prompt, 2)

    async def cached() -> bool:
        return await _cached_blocks(cluster, prompt) == 2

    await context.until(cached, "prefill is told of two cached blocks")
    kvstore.port.inbox.clear()
    kvstore.instead["snapshot_blocks"] = _never
    await _stored(kvstore, other, 1, skip=3)
    caller, asked = await kvstore.port.expect({"type": "snapshot_blocks"})
    hashes = [bytes(each) for each in block_hashes(other, model=LAYOUT["model"], block_size=16)]
    await kvstore.port.send(
        caller,
        {
            "type": "blocks_snapshot",
            "sequence": kvstore.port.sequence,
            "hashes": hashes[:4],
            "ticket": asked.get("ticket", ""),
        },
    )

    async def replaced() -> bool:
        return (
            await _cached_blocks(cluster, other) == 4 and await _cached_blocks(cluster, prompt) == 0
        )

    await context.until(replaced, "the snapshot replaces what was known of the kvstore")


@check(
    "conductor.events.snapshot-on-join",
    roles=_CONDUCTOR,
    needs="alone",
    says="Tell all that you store.",
)
async def _snapshot_on_join(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context, kvstore=1)
    await cluster.of("kvstore")[0].port.expect({"type": "snapshot_blocks"})


@check(
    "conductor.events.other-layout",
    roles=_CONDUCTOR,
    needs="alone",
    says="It does not use a kvstore whose layout differs, and names it in its log and in"
    " `/debug/cluster`.",
)
async def _events_other_layout(context: CheckContext) -> None:
    cluster = await PlayedCluster.open(context)
    kvstore = await cluster.join("kvstore", layout={**LAYOUT, "n_layers": 9})
    await cluster.greeted()
    await kvstore.port.expect({"type": "snapshot_blocks"})
    prompt = cluster.prompt(5 * 16)
    # A gap has it ask for all, so that it surely knows of these blocks.
    await _stored(kvstore, prompt, 3, skip=3)
    await kvstore.port.expect({"type": "snapshot_blocks"})
    for _ in range(3):
        if await _cached_blocks(cluster, prompt):
            raise CheckFailed("reads blocks of another layout")
        await asyncio.sleep(0.2)
