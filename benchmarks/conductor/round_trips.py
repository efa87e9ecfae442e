"""Measure a reservation and a prefill at our fake workers, without a conductor.

This corresponds to "no router" for HTTP engines: the floor of every router with two workers.

    python -m benchmarks.conductor.round_trips METADATA_URL RATE SECONDS N_TOKENS SEED

Poisson arrivals; prints the seconds of each pair of round trips as a list in JSON.
"""

import asyncio
import random
import sys
import time

import msgspec
import uvloop

from halfmoon_metadata import open_store
from halfmoon_protocol.ids import ConductorId, RequestId
from halfmoon_protocol.messages import (
    AnyMessage,
    DecodeReserved,
    Hello,
    PrefillDone,
    ReserveDecode,
    StartPrefill,
    Welcome,
)
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_runtime.channels.network import WorkerLink
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.membership import list_members

WARM_S = 0.7


class Asking:
    """Both links, and who waits for what from them."""

    def __init__(self, prefill: WorkerLink, decode: WorkerLink, n_tokens: int) -> None:
        self._prefill, self._decode = prefill, decode
        self._n_tokens = n_tokens
        self._waiting: dict[RequestId, asyncio.Future[AnyMessage]] = {}

    async def listen(self, link: WorkerLink) -> None:
        """Wake whoever waits for what comes in."""
        while True:
            message = await link.receive()
            if isinstance(message, DecodeReserved | PrefillDone):
                self._waiting.pop(message.request_id).set_result(message)

    async def both(self, request_id: RequestId) -> float:
        """One reservation and one prefill; seconds."""
        began_s = time.perf_counter()
        stopping = Stopping(max_new_tokens=1)
        reserve = ReserveDecode(request_id=request_id, n_tokens=self._n_tokens, stopping=stopping)
        reserved = await self._ask(self._decode, request_id, reserve)
        assert isinstance(reserved, DecodeReserved)
        start = StartPrefill(
            request_id=request_id,
            token_ids=tuple(range(self._n_tokens)),
            n_prompt=self._n_tokens,
            block_hashes=(),
            landing=reserved.landing,
            landing_expires_s=reserved.expires_s,
            sampling=Sampling(),
            stopping=stopping,
        )
        await self._ask(self._prefill, request_id, start)
        return time.perf_counter() - began_s

    async def _ask(
        self, link: WorkerLink, request_id: RequestId, message: ReserveDecode | StartPrefill
    ) -> AnyMessage:
        answer: asyncio.Future[AnyMessage] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = answer
        await link.send(message)
        return await answer


async def main(metadata: str, rate: float, seconds: float, n_tokens: int, seed: int) -> list[float]:
    """Ask for so long; seconds of each."""
    network, dice = ZmqNetwork(), random.Random(seed)
    links = {}
    for info in (await list_members(open_store(metadata))).values():
        links[info.role] = link = await network.dial(info.commands)
        await link.send(Hello(conductor_id=ConductorId("round-trips"), session=1))
        assert isinstance(await link.receive(), Welcome)
    asking = Asking(links["prefill"], links["decode"], n_tokens)
    listening = [asyncio.create_task(asking.listen(link)) for link in links.values()]
    began_s = due_s = time.perf_counter()
    asked: list[asyncio.Task[float]] = []
    n_warm = 0
    while (due_s := due_s + dice.expovariate(rate)) < began_s + WARM_S + seconds:
        await asyncio.sleep(due_s - time.perf_counter())
        n_warm += due_s < began_s + WARM_S
        asked.append(asyncio.create_task(asking.both(RequestId(f"round-trip-{len(asked)}"))))
    taken_s = await asyncio.gather(*asked)
    for task in listening:
        task.cancel()
    await network.close()
    return taken_s[n_warm:]


if __name__ == "__main__":
    url, rate, seconds, n_tokens, seed = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        taken_s = runner.run(main(url, float(rate), float(seconds), int(n_tokens), int(seed)))
    sys.stdout.buffer.write(msgspec.json.encode(taken_s))
