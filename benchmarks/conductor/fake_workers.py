"""Run a prefill and a decode worker in one process, with an engine that costs nothing.

They speak the ZeroMQ protocol and hold nothing: a reservation is granted at once, a prefill
answers with its first token at once, and decoding gives every running request one token per
step. So a conductor's whole work is there, and hardly any of a worker's.

    python -m benchmarks.conductor.fake_workers METADATA_URL STEP_S TOKEN,TOKEN,…
"""

import asyncio
import itertools
import sys

import msgspec
import uvloop

from benchmarks.conductor.ticking import tick_forever
from halfmoon_metadata import MetadataStore, open_store
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    Cancel,
    DecodeCost,
    DecodeReserved,
    Hello,
    PrefillCost,
    PrefillDone,
    PrefillStopped,
    Produced,
    ReserveDecode,
    Role,
    StartDecode,
    StartPrefill,
    TokensProduced,
    Welcome,
    WorkerInfo,
)
from halfmoon_protocol.regions import Landing, Region
from halfmoon_protocol.sampling import Finish
from halfmoon_runtime.channels.network import PeerId, PeerUnreachable, Port
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.membership import Membership, next_generation

LAYOUT = KvLayout(
    model="bench", n_layers=2, n_kv_heads=1, head_dim=8, dtype="float32", block_size=64
)
MAX_CONTEXT = 1_000_000


class _Running:
    """A request that decodes."""

    def __init__(self, peer: PeerId, n_left: int) -> None:
        self.peer = peer
        self.n_left = n_left


class FakeWorker:
    """Both roles know the same answers; a conductor asks each only for its own."""

    def __init__(self, port: Port, info: WorkerInfo, tokens: list[int]) -> None:
        self._port = port
        self._info = info
        self._tokens = itertools.cycle(tokens)
        self._first_token = tokens[0]
        self._region = Region(info.worker_id, info.generation, bytes(16), 1 << 30)
        self._running: dict[RequestId, _Running] = {}
        #: Tokens that each reservation may get.
        self._reserved: dict[RequestId, int] = {}
        self._steps = itertools.count()

    async def serve(self) -> None:
        """Answer without end."""
        while True:
            await self._answer(*await self._port.receive())

    async def step(self) -> None:
        """One token for each request; one message for each conductor."""
        token, number = next(self._tokens), next(self._steps)
        produced: dict[PeerId, list[Produced]] = {}
        for request_id, running in [*self._running.items()]:
            running.n_left -= 1
            finish: Finish = "" if running.n_left else "length"
            produced.setdefault(running.peer, []).append(Produced(request_id, token, finish))
            if finish:
                del self._running[request_id]
        for peer, part in produced.items():
            try:
                await self._port.send(peer, TokensProduced(step=number, produced=tuple(part)))
            except PeerUnreachable:
                for one in part:
                    self._running.pop(one.request_id, None)

    async def _answer(self, peer: PeerId, message: msgspec.Struct) -> None:
        match message:
            case Hello():
                self._running.clear()
                await self._port.send(peer, Welcome(worker=self._info))
            case ReserveDecode(request_id=request_id, n_tokens=n_tokens, stopping=stopping):
                self._reserved[request_id] = stopping.max_new_tokens
                pages = tuple(range(LAYOUT.blocks_for(n_tokens)))
                landing = Landing(self._region, pages, LAYOUT)
                await self._port.send(
                    peer, DecodeReserved(request_id=request_id, landing=landing, expires_s=60.0)
                )
            case StartPrefill(request_id=request_id, stopping=stopping):
                done = PrefillDone(
                    request_id=request_id,
                    first_token=self._first_token,
                    finish="length" if stopping.max_new_tokens == 1 else "",
                    n_cached=0,
                    queue_s=0.0,
                    compute_s=0.0,
                    drain_s=0.0,
                )
                await self._port.send(peer, done)
            case StartDecode(request_id=request_id):
                n_left = self._reserved.pop(request_id) - 1
                self._running[request_id] = _Running(peer, n_left)
            case Cancel(request_id=request_id):
                self._reserved.pop(request_id, None)
                self._running.pop(request_id, None)
                if self._info.role == "prefill":
                    await self._port.send(peer, PrefillStopped(request_id=request_id))


async def be(
    role: Role, store: MetadataStore, network: ZmqNetwork, step_s: float, tokens: list[int]
) -> None:
    """Be one of the two until cancelled."""
    worker_id = WorkerId(f"{role}-0")
    port = await network.bind(worker_id)
    info = WorkerInfo(
        worker_id=worker_id,
        role=role,
        generation=await next_generation(store, worker_id),
        host="bench",
        commands=port.commands,
        events=port.events,
        layout=LAYOUT,
        model="bench",
        max_context=MAX_CONTEXT,
        n_blocks=1_000_000,
        prefill_cost=PrefillCost(1e-4, 1e-8, 0.0) if role == "prefill" else None,
        decode_cost=DecodeCost(1e-4, 1e-7, 0.0) if role == "decode" else None,
    )
    worker, membership = FakeWorker(port, info, tokens), Membership(store, info)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.serve())
        await membership.join()
        tasks.create_task(membership.keep_alive())
        if role == "decode":
            tasks.create_task(tick_forever(step_s, worker.step))


async def main(metadata: str, step_s: float, tokens: list[int]) -> None:
    """Be both."""
    store, network = open_store(metadata), ZmqNetwork()
    async with asyncio.TaskGroup() as tasks:
        for role in ("prefill", "decode"):
            tasks.create_task(be(role, store, network, step_s, tokens))


if __name__ == "__main__":
    url, step, token_ids = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(url, float(step), [int(token) for token in token_ids.split(",")]))
