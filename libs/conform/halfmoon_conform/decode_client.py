"""Play a conductor and a prefill worker to a decode worker."""

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from halfmoon_conform.blocks import block_bytes
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.peers.caller import Caller
from halfmoon_conform.peers.wire_maps import WireMap
from halfmoon_conform.verdict import CheckFailed, require

#: Times that a landing is asked for, about a second apart.
_TRIES = 60
GREEDY: dict[str, Any] = {"temperature": 0.0}


def make_kv(chance: random.Random, layout: dict[str, Any], n_tokens: int) -> list[bytes]:
    """Make the bytes of the blocks of a prompt: small numbers, as any engine can compute with."""
    return [_numbers(chance, layout) for _ in range(-(-n_tokens // layout["block_size"]))]


def _numbers(chance: random.Random, layout: dict[str, Any]) -> bytes:
    """Make random bytes into numbers from 1/8 to 2 and their negatives, by their highest byte."""
    item = 2 if layout["dtype"] != "float32" else 4
    table = _HALF if layout["dtype"] == "float16" else _WIDE
    numbers = bytearray(chance.randbytes(block_bytes(layout)))
    numbers[item - 1 :: item] = numbers[item - 1 :: item].translate(table)
    return bytes(numbers)


#: Sign and exponent of float32 and bfloat16, and of float16.
_WIDE = bytes(byte & 0x80 | 0x3E | byte & 0x01 for byte in range(256))
_HALF = bytes(byte & 0x80 | 0x30 | byte & 0x0F for byte in range(256))


@dataclass
class DecodeAnswer:
    """Hold what a request got: its tokens, and how it ended."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    #: Scores of its tokens, if any came.
    scores: list[Any] = field(default_factory=list)
    #: The message that ended it instead of a last token.
    failed: WireMap | None = None
    #: The step of each message that had a token of it.
    steps: list[int] = field(default_factory=list)


class DecodeClient:
    """Run requests at the subject through one connection."""

    def __init__(self, context: CheckContext, caller: Caller) -> None:
        self.context, self.caller = context, caller
        self._reserved: list[str] = []
        #: Messages that a request's answer has not taken yet, oldest first.
        self._parts: dict[str, deque[WireMap]] = defaultdict(deque)

    @classmethod
    async def open(cls, context: CheckContext, name: str | None = None) -> "DecodeClient":
        """Connect, and say hello."""
        return cls(context, await context.connect(name))

    async def reserve(
        self, n_tokens: int, max_new_tokens: int = 8, request_id: str = "", **more: Any
    ) -> WireMap:
        """Reserve a landing, and return the answer, a refusal too."""
        request_id = request_id or self.context.name("request")
        if not self._reserved:
            self.context.on_end(self._give_back)
        self._reserved.append(request_id)
        stopping = more.pop("stopping", {"max_new_tokens": max_new_tokens})
        await self.caller.send(
            {
                "type": "reserve_decode",
                "request_id": request_id,
                "n_tokens": n_tokens,
                "stopping": stopping,
                **more,
            }
        )
        return await self.caller.take(
            lambda m: m.get("request_id") == request_id, f"an answer to reserve_decode {request_id}"
        )

    async def _give_back(self) -> None:
        """Cancel what the check reserved, so that others find room."""
        for request_id in () if self.caller.closed else self._reserved:
            await self.caller.send({"type": "cancel", "request_id": request_id})

    async def landing(self, n_tokens: int, max_new_tokens: int = 8, **more: Any) -> WireMap:
        """Reserve a landing, and return the whole answer; wait while others have the room.

        Raises:
            CheckFailed: it is refused.
        """
        for _ in range(_TRIES):
            answer = await self.reserve(n_tokens, max_new_tokens, **more)
            if answer["type"] == "decode_reserved":
                return answer
            if not answer["retryable"]:
                break
            await asyncio.sleep(min(answer.get("retry_after_s", 1.0), 1.0))
        raise CheckFailed(f"refused {n_tokens} tokens: {answer.get('reason')}")

    async def write(self, landing: WireMap, kv: Sequence[bytes], first: int = 0) -> list[int]:
        """Write blocks into a landing's pages from the one of number `first` on."""
        size = block_bytes(landing["layout"])
        connection = await self.context.dial(landing["region"])
        try:
            pages = landing["pages"][first:]
            parts = [(page * size, block) for page, block in zip(pages, kv, strict=False)]
            return await connection.write_bytes(landing["region"], parts)
        finally:
            await connection.close()

    async def start(
        self,
        request_id: str,
        first_token: int = 1,
        max_new_tokens: int = 8,
        n_prompt: int = 1,
        sampling: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Start decoding; `more` replaces fields of the message and of `stopping`."""
        stopping = {"max_new_tokens": max_new_tokens, **more.pop("stopping", {})}
        # The reservation has said it to a worker whose record has features.
        repeated = {"stopping": stopping} if "features" not in self.context.subject.record else {}
        await self.caller.send(
            {
                "type": "start_decode",
                "request_id": request_id,
                "first_token": first_token,
                "sampling": GREEDY if sampling is None else sampling,
                **repeated,
                "n_prompt": n_prompt,
                **more,
            }
        )

    async def answer(self, request_id: str, *, n_tokens: int | None = None) -> DecodeAnswer:
        """Collect a request's tokens until it ends, or until there are so many."""
        found = DecodeAnswer()
        while not found.finish and found.failed is None:
            if n_tokens is not None and len(found.tokens) >= n_tokens:
                return found
            message = await self._next_part(request_id)
            if message["type"] == "decode_failed":
                found.failed = message
                continue
            found.steps.append(message.get("step", 0))
            for produced in message["produced"]:
                if produced[0] == request_id:
                    found.tokens.append(produced[1])
                    found.finish = produced[2] if len(produced) > 2 else ""
            found.scores += [s for name, s in message.get("scores", []) if name == request_id]
        return found

    async def _next_part(self, request_id: str) -> WireMap:
        """Take the next message that concerns a request; hand out others to theirs."""
        while not self._parts[request_id]:
            message = await self.caller.take(
                lambda m: m.get("type") in ("tokens_produced", "decode_failed"),
                f"tokens of {request_id}",
            )
            names = {produced[0] for produced in message.get("produced", [])}
            for name in names or {message.get("request_id", "")}:
                self._parts[name].append(message)
        return self._parts[request_id].popleft()

    def has_part_of(self, request_id: str) -> bool:
        """Return whether a message that concerns a request came, and was not taken."""
        return bool(self._parts[request_id]) or request_id in repr(self.caller.inbox)

    async def run(
        self,
        kv: Sequence[bytes],
        n_tokens: int,
        max_new_tokens: int = 8,
        **more: Any,
    ) -> DecodeAnswer:
        """Reserve, land, start and collect: a whole request."""
        stopping = {"max_new_tokens": max_new_tokens, **more.get("stopping", {})}
        reserved = await self.landing(n_tokens, stopping=stopping)
        statuses = await self.write(reserved["landing"], kv)
        require(not any(statuses), f"writes into a landing have the statuses {statuses}")
        more.setdefault("n_prompt", n_tokens)
        await self.start(reserved["request_id"], max_new_tokens=max_new_tokens, **more)
        return await self.answer(reserved["request_id"])
