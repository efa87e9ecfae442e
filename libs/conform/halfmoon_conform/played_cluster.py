"""Play the workers of a cluster to a conductor: they keep the protocol, unless told not to.

A token depends on its position alone, so that a later try goes on with the tokens of the first.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.peers.openai_client import HttpAnswer, HttpStream, request
from halfmoon_conform.peers.played_port import PlayedPort
from halfmoon_conform.peers.wire_maps import WireMap
from halfmoon_conform.subject.conductor_subject import ConductorSubject
from halfmoon_conform.verdict import CheckFailed, require

LAYOUT: dict[str, Any] = {
    "model": "conform",
    "n_layers": 2,
    "n_kv_heads": 1,
    "head_dim": 16,
    "dtype": "float32",
    "block_size": 16,
}
MODEL = "conform-model"
_REFRESH_S = 0.25
#: Seconds that a landing is held.
LANDING_S = 60.0


def token_at(position: int) -> int:
    """Return the token at a position of a prompt and its answer."""
    return 20 + position * 7 % 60


class PlayedWorker:
    """One prefill worker, decode worker or kvstore."""

    def __init__(self, context: CheckContext, role: str, **record: Any) -> None:
        self.role = role
        self.name = record.pop("worker_id", context.name(role))
        whole = {
            "worker_id": self.name,
            "role": role,
            "layout": LAYOUT,
            "model": "" if role == "kvstore" else MODEL,
            "max_context": 4096,
            "n_blocks": 4096,
            "prefill_cost": {"c0_s": 0.001, "c1_s": 1e-6},
            "decode_cost": {"d0_s": 0.001},
            **record,
        }
        self.port = PlayedPort(context.sockets, context.subject.cluster_key, whole)
        self.port.handler = self._handle
        #: Replaces the answer to a message of a type; returns whether it has dealt with it.
        self.instead: dict[str, Callable[[bytes, WireMap], Awaitable[bool]]] = {}
        #: Reserved requests: tokens of the prompt, and how many new ones.
        self.reserved: dict[str, tuple[int, int]] = {}
        #: Tokens that decode produces before it stops; None: all.
        self.stops_after: int | None = None
        self.step = 0
        #: Blocks that a kvstore's events tell of, in order.
        self.stored: dict[bytes, None] = {}
        #: The connection that said hello last.
        self.caller = b""
        #: Types of messages by connection, in order.
        self.order: dict[bytes, list[str]] = {}

    @property
    def record(self) -> WireMap:
        """Return its record."""
        return self.port.record

    async def _handle(self, caller: bytes, message: WireMap) -> bool:
        kind = message["type"]
        self.order.setdefault(caller, []).append(kind)
        if kind in self.instead and await self.instead[kind](caller, message):
            return False
        answer = getattr(self, f"_on_{kind}", None)
        if answer is not None:
            await answer(caller, message)
        return False

    async def _on_hello(self, caller: bytes, _: WireMap) -> None:
        self.caller = caller
        await self.port.send(caller, {"type": "welcome", "worker": self.record})

    async def _on_snapshot_blocks(self, caller: bytes, message: WireMap) -> None:
        await self.port.send(
            caller,
            {
                "type": "blocks_snapshot",
                "sequence": self.port.sequence,
                "hashes": list(self.stored),
                "ticket": message.get("ticket", ""),
            },
        )

    async def _on_reserve_decode(self, caller: bytes, message: WireMap) -> None:
        n_tokens = message["n_tokens"]
        self.reserved[message["request_id"]] = (n_tokens, message["stopping"]["max_new_tokens"])
        await self.port.send(caller, self.landing(message))

    def landing(self, message: WireMap) -> WireMap:
        """Return the answer to a reservation."""
        n_pages = -(-message["n_tokens"] // LAYOUT["block_size"])
        region = {
            "segment": self.name,
            "generation": self.record["generation"],
            "key": secrets.token_bytes(16),
            "length": 1 << 30,
        }
        return {
            "type": "decode_reserved",
            "request_id": message["request_id"],
            "landing": {"region": region, "pages": list(range(n_pages)), "layout": LAYOUT},
            "expires_s": LANDING_S,
        }

    async def _on_start_prefill(self, caller: bytes, message: WireMap) -> None:
        await self.port.send(caller, self.done(message))

    def done(self, message: WireMap) -> WireMap:
        """Return the answer to a prompt."""
        limit = message["stopping"]["max_new_tokens"]
        return {
            "type": "prefill_done",
            "request_id": message["request_id"],
            "first_token": token_at(len(message["token_ids"])),
            "finish": "length" if limit == 1 else "",
            "n_cached": 0,
            "queue_s": 0.0,
            "compute_s": 0.001,
            "drain_s": 0.0,
        }

    async def _on_start_decode(self, caller: bytes, message: WireMap) -> None:
        request_id = message["request_id"]
        n_tokens, limit = self.reserved[request_id]
        n_more = limit - 1 if self.stops_after is None else min(self.stops_after, limit - 1)
        for i in range(1, n_more + 1):
            finish = "length" if i == limit - 1 else ""
            await self.produce(caller, request_id, token_at(n_tokens + i), finish)

    async def produce(
        self, caller: bytes, request_id: str, token: int, finish: str = "", step: int | None = None
    ) -> None:
        """Send one token."""
        self.step += 1
        number = self.step if step is None else step
        produced = [[request_id, token, finish]]
        await self.port.send(
            caller, {"type": "tokens_produced", "step": number, "produced": produced}
        )

    async def _on_cancel(self, caller: bytes, message: WireMap) -> None:
        if self.role == "prefill":
            answer = {"type": "prefill_stopped", "request_id": message["request_id"]}
            await self.port.send(caller, answer)

    async def publish_event(self, event: WireMap, *, skip: int = 0) -> None:
        """Publish a KV event, with a gap of so many numbers before it."""
        hashes = dict.fromkeys(event["block_hashes"])
        if event["type"] == "BlockStored":
            self.stored.update(hashes)
        else:
            self.stored = {each: None for each in self.stored if each not in hashes}
        await self.port.publish_events([event], skip=skip)

    async def publish_load(self) -> None:
        """Publish that nothing waits."""
        loads: dict[str, WireMap] = {
            "prefill": {
                "type": "prefill_load",
                "n_queued": 0,
                "queued_tokens": 0,
                "free_pages": 4096,
                "n_pages": 4096,
            },
            "decode": {
                "type": "decode_load",
                "n_running": 0,
                "n_reserved": 0,
                "context_tokens": 0,
                "free_pages": 4096,
                "n_pages": 4096,
                "step_s": 0.001,
            },
            "kvstore": {
                "type": "kvstore_load",
                "n_stored": 0,
                "n_reserved": 0,
                "n_leased": 0,
                "n_blocks": 4096,
                "sequence": self.port.sequence,
            },
        }
        await self.port.publish(loads[self.role])


class PlayedCluster:
    """Workers for one check, which leave at its end."""

    def __init__(self, context: CheckContext) -> None:
        self.context = context
        self.workers: list[PlayedWorker] = []
        assert isinstance(context.subject, ConductorSubject)
        self.url = context.subject.url

    @classmethod
    async def open(
        cls, context: CheckContext, *, prefill: int = 1, decode: int = 1, kvstore: int = 0
    ) -> "PlayedCluster":
        """Register so many workers, and wait until the conductor has greeted each."""
        cluster = cls(context)
        for role, n in (("prefill", prefill), ("decode", decode), ("kvstore", kvstore)):
            for _ in range(n):
                await cluster.join(role)
        await cluster.greeted()
        beat = asyncio.create_task(cluster._publish())

        async def stop() -> None:
            beat.cancel()

        context.on_end(stop)
        return cluster

    async def join(self, role: str, **record: Any) -> PlayedWorker:
        """Register one more worker."""
        worker = PlayedWorker(self.context, role, **record)
        self.workers.append(worker)
        self.context.on_end(lambda: self.leave(worker))
        await worker.port.register(self.context.subject.store)
        return worker

    async def leave(self, worker: PlayedWorker) -> None:
        """Remove a worker's record, and close its sockets, as a crash would be noticed."""
        key = f"halfmoon/members/{worker.name}"
        await asyncio.to_thread(self.context.subject.store.delete, key)
        if not worker.port.closed:
            await worker.port.close()

    async def greeted(self) -> None:
        """Wait until the conductor has said hello to each worker, and uses it."""
        for worker in self.workers:

            async def hello(worker: PlayedWorker = worker) -> bool:
                return bool(worker.caller)

            await self.context.until(hello, f"a hello to {worker.name}")

    def of(self, role: str) -> list[PlayedWorker]:
        """Return the workers of a role."""
        return [worker for worker in self.workers if worker.role == role]

    async def _publish(self) -> None:
        while True:
            for worker in self.workers:
                if not worker.port.closed:
                    await worker.publish_load()
            await asyncio.sleep(_REFRESH_S)

    # -- a client ------------------------------------------------------------------------------

    def prompt(self, n_tokens: int = 40) -> list[int]:
        """Return a prompt that no other check has."""
        return [self.context.chance.randrange(97) for _ in range(n_tokens)]

    def body(self, prompt: list[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """Return the body of a completion."""
        return {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            **more,
        }

    async def complete(self, prompt: list[int], max_tokens: int = 8, **more: Any) -> HttpAnswer:
        """Ask for a completion, and wait until the conductor uses the workers."""
        body = self.body(prompt, max_tokens, **more)

        async def answered() -> HttpAnswer | None:
            answer = await request(self.url, "POST", "/v1/completions", body)
            return None if answer.status == 503 else answer

        found: HttpAnswer = await self.context.until(answered, "an answer other than 503")
        return found

    async def text(self, prompt: list[int], max_tokens: int = 8, **more: Any) -> str:
        """Ask for a completion, and return its text.

        Raises:
            CheckFailed: it has another number of tokens, or there is none.
        """
        answer = await self.complete(prompt, max_tokens, **more)
        if answer.status != 200:
            raise CheckFailed(f"answered {answer.status}: {answer.body[:300]!r}")
        found = answer.json()
        n_tokens = found["usage"]["completion_tokens"]
        require(n_tokens == max_tokens, f"{n_tokens} tokens of {max_tokens}")
        return str(found["choices"][0]["text"])

    async def stream(self, prompt: list[int], max_tokens: int = 8, **more: Any) -> HttpStream:
        """Ask for a streamed completion."""
        body = self.body(prompt, max_tokens, stream=True, **more)
        return await HttpStream.open(self.url, "POST", "/v1/completions", body)
