"""An inference server without vLLM: real HTTP and ZeroMQ, a model that is a hash of its context.

It answers as vLLM does where the bridge looks, keeps a prefix cache, publishes KV events, and
breaks in all ways that tests ask for. Tokens depend on the whole context, so a continuation at
another server is right only if it got each token.
"""

import asyncio
import hashlib
import itertools
import json
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

BLOCK_SIZE = 16
MODEL = "plain"
N_VOCAB = 1000
_serial = itertools.count()


def next_token(context: Sequence[int]) -> int:
    """Return the model's next token: never one below 3."""
    digest = hashlib.sha256(repr(list(context)).encode()).digest()
    return 3 + int.from_bytes(digest[:4], "big") % (N_VOCAB - 3)


def answer_of(prompt: Sequence[int], n: int) -> list[int]:
    """Return what the model generates."""
    context = list(prompt)
    for _ in range(n):
        context.append(next_token(context))
    return context[len(prompt) :]


@dataclass
class PlainServer:
    """One server; `open` starts it, `kill` ends it as SIGKILL does."""

    port: int = 0
    has_events: bool = True
    n_blocks: int = 1000
    max_model_len: int = 4096
    #: What the next streams do: "", "500", "400", "silent end", "hang", "garbage".
    fault: str = ""
    #: Tokens before the fault.
    fault_after: int = 0
    #: Whether the health is bad, or not told at all.
    is_sick: bool = False
    #: Unset: nothing is answered, as by a stopped process.
    thaw: asyncio.Event = field(default_factory=asyncio.Event)
    kv_usage: float = 0.0
    #: For a decode server of a pair: it chooses another first token than the prefill server.
    differs: bool = False
    #: Unset: streams wait before each token behind the first.
    go: asyncio.Event = field(default_factory=asyncio.Event)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    #: Cached tokens of each request, in order.
    cached: list[int] = field(default_factory=list)
    n_open: int = 0
    blocks: set[bytes] = field(default_factory=set)
    pair_params: dict[str, Any] = field(default_factory=dict)
    #: What a decode server of a pair was told to have its prefill server free.
    released: list[dict[str, Any]] = field(default_factory=list)
    _sequence: int = -1

    def __post_init__(self) -> None:
        self.go.set()
        self.thaw.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/kv_event_sources", self._event_sources)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await self._site.start()
        self.port = self._runner.addresses[0][1]
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.linger = 0
        self.events_port = self._publisher.bind_to_random_port("tcp://127.0.0.1")
        self.blocks.clear()
        self._sequence = -1

    async def kill(self) -> None:
        """Close the listener and every connection at once, and forget the cache."""
        server = self._runner.server
        assert server is not None
        await self._site.stop()
        for connection in list(server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        self._context.destroy(linger=0)

    # -- what a vLLM says of itself ----------------------------------------------------------

    async def _models(self, _: web.Request) -> web.Response:
        card = {
            "id": MODEL,
            "owned_by": "vllm",
            "root": "/models/plain",
            "max_model_len": self.max_model_len,
        }
        return web.json_response({"data": [card]})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _metrics(self, _: web.Request) -> web.Response:
        await self.thaw.wait()
        labels = f'block_size="{BLOCK_SIZE}",engine="0",num_gpu_blocks="{self.n_blocks}"'
        text = (
            f"vllm:cache_config_info{{{labels}}} 1.0\n"
            f'vllm:num_requests_running{{engine="0"}} {self.n_open}.0\n'
            'vllm:num_requests_waiting{engine="0"} 0.0\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {self.kv_usage}\n'
        )
        return web.Response(text=text)

    async def _health(self, _: web.Request) -> web.Response:
        await self.thaw.wait()
        return web.Response(status=503 if self.is_sick else 200)

    async def _event_sources(self, _: web.Request) -> web.Response:
        if not self.has_events:
            raise web.HTTPNotFound
        source = {
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": None,
            "topic": "kv",
            "publisher": "zmq",
            "enable_kv_cache_events": True,
        }
        return web.json_response({"0": source})

    # -- requests ----------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("use_beam_search"):
            self.released.append(body["kv_transfer_params"])
            return web.json_response({"error": {"message": "no beams here"}}, status=400)
        self.bodies.append(body)
        if self.fault in ("400", "500") and self.fault_after == 0:
            message = {"error": {"message": "no such thing", "code": int(self.fault)}}
            return web.json_response(message, status=int(self.fault))
        n_cached = await self._compute(body["prompt"], body.get("cache_salt", ""))
        self.cached.append(n_cached)
        if not body["stream"]:
            return web.json_response(self._pair_answer(body))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.n_open += 1
        try:
            await response.prepare(request)
            await self._stream(response, body, n_cached)
        finally:
            self.n_open -= 1
        return response

    async def _stream(
        self, response: web.StreamResponse, body: dict[str, Any], n_cached: int
    ) -> None:
        context: list[int] = list(body["prompt"])
        n_prompt, n_new = len(context), body["max_tokens"]
        finish = None
        while finish is None:
            n_done = len(context) - n_prompt
            if self.fault and n_done == self.fault_after:
                if self.fault == "hang":
                    await asyncio.Event().wait()
                if self.fault == "garbage":
                    await response.write(b'data: {"choices": 7}\n\n')
                if self.fault == "silent end":
                    return
            if n_done:
                await self.go.wait()
                await self.thaw.wait()
            token = next_token(context)
            while n_done < body["min_tokens"] and token in body["stop_token_ids"]:
                token = 3 + (token - 2) % (N_VOCAB - 3)
            if self.differs and not n_done and "kv_transfer_params" in body:
                token = 3 if token != 3 else 4
            context.append(token)
            if token in body["stop_token_ids"]:
                finish = "stop"
            elif n_done + 1 == n_new:
                finish = "length"
            choice = {"index": 0, "text": "x", "token_ids": [token], "finish_reason": finish}
            await self._send(response, {"choices": [choice]})
        await self._compute(context, body.get("cache_salt", ""))
        usage = {
            "prompt_tokens": n_prompt,
            "completion_tokens": len(context) - n_prompt,
            "prompt_tokens_details": {"cached_tokens": n_cached},
        }
        await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    async def _send(self, response: web.StreamResponse, data: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _pair_answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer as the prefill server of a pair."""
        token = next_token(body["prompt"])
        self.pair_params = {
            "do_remote_prefill": True,
            "remote_request_id": f"r{next(_serial)}",
            "remote_block_ids": [1, 2, 3],
        }
        return {
            "choices": [{"index": 0, "text": "x", "token_ids": [token], "finish_reason": "length"}],
            "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1},
            "kv_transfer_params": self.pair_params,
        }

    # -- the prefix cache --------------------------------------------------------------------

    async def _compute(self, tokens: Sequence[int], salt: str) -> int:
        """Cache the full blocks of a context; return how many of its tokens were cached."""
        hashes: list[bytes] = []
        parent = salt.encode()
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            block = repr(tokens[start : start + BLOCK_SIZE]).encode()
            parent = hashlib.sha256(parent + block).digest()
            hashes.append(parent)
        known = next((i for i, h in enumerate(hashes) if h not in self.blocks), len(hashes))
        self.blocks.update(hashes)
        if known < len(hashes):
            n_new = len(hashes) - known
            await self._publish(
                {
                    "type": "BlockStored",
                    "block_hashes": [_number(h) for h in hashes[known:]],
                    "parent_block_hash": _number(hashes[known - 1]) if known else None,
                    "token_ids": list(tokens[known * BLOCK_SIZE : len(hashes) * BLOCK_SIZE]),
                    "block_size": BLOCK_SIZE,
                    "lora_id": None,
                    "medium": "GPU",
                    "extra_keys": [
                        [salt] if salt and known + i == 0 else None for i in range(n_new)
                    ],
                }
            )
        return min(known, (len(tokens) - 1) // BLOCK_SIZE) * BLOCK_SIZE

    async def clear(self) -> None:
        """Drop the whole cache, and say so."""
        self.blocks.clear()
        await self._publish({"type": "AllBlocksCleared"})

    async def _publish(self, event: dict[str, Any]) -> None:
        if not self.has_events:
            return
        self._sequence += 1
        payload = msgspec.msgpack.encode([0.0, [event], 0])
        await self._publisher.send_multipart([b"kv", struct.pack(">q", self._sequence), payload])


def _number(block: bytes) -> int:
    return int.from_bytes(block[:8], "big")


@asynccontextmanager
async def plain_servers(n: int, **fields: Any) -> AsyncGenerator[list[PlainServer], None]:
    """Open servers, and kill those that are left at the end."""
    servers = [PlainServer(**fields) for _ in range(n)]
    for server in servers:
        await server.open()
    try:
        yield servers
    finally:
        for server in servers:
            server.go.set()
            server.thaw.set()
            await server.kill()
