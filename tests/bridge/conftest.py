"""A conductor and bridges in this process, before plain servers on real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from halfmoon_conductor.build_conductor import build_conductor
from halfmoon_conductor.engine_io.gateway_interface import GenerationRequest, TokenEvent
from halfmoon_metadata import MemoryStore
from halfmoon_protocol.ids import ConductorId
from halfmoon_protocol.messages import Role
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_runtime.channels.memory_network import MemoryNetwork
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_servers.bridge.pair_releaser import PairReleaser
from halfmoon_servers.bridge.server_supervisor import ServerSupervisor
from halfmoon_servers.bridge.server_target import ServerRole, ServerTarget
from halfmoon_servers.client.server_client import ClientLimits, ServerClient
from halfmoon_servers.kv_events.server_salts import ServerSalts
from tests.bridge.plain_server import PlainServer

GREEDY = Sampling(temperature=0.0)
WITHIN_S = 30.0


@dataclass
class RoutedServers:
    """The conductor, the bridges, and a client's way in."""

    stack: AsyncExitStack
    config: SchedulingConfig
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    store: MemoryStore = field(default_factory=MemoryStore)
    salts: ServerSalts = field(default_factory=ServerSalts)
    releaser: PairReleaser = field(default_factory=PairReleaser)
    supervisors: list[ServerSupervisor] = field(default_factory=list)
    n_requests: int = 0

    async def open(self) -> None:
        built = build_conductor(ConductorId("conductor-0"), self.store, self.network, self.config)
        self.core, self.shell, self.gateway = built.core, built.shell, built.gateway
        self._start(built.run())

    def bridge(
        self,
        server: PlainServer,
        role: ServerRole = "both",
        *,
        stall_s: float = 60.0,
        status_s: float = 10.0,
    ) -> None:
        """Bridge one more server; it need not be up."""
        client = ServerClient(
            server.url,
            limits=ClientLimits(
                idle_timeout_s=stall_s, first_byte_timeout_s=stall_s, status_timeout_s=status_s
            ),
        )
        self.stack.push_async_callback(client.close)
        supervisor = ServerSupervisor(
            f"server-{len(self.supervisors)}",
            ServerTarget(server.url, role),
            client,
            self.salts,
            self.releaser,
            host_id="here",
            host="127.0.0.1",
            block_size=0,
        )
        self.supervisors.append(supervisor)
        self._start(supervisor.run(self.network, self.store))

    async def bridge_pair(self, prefill: PlainServer, *decodes: PlainServer) -> None:
        """Bridge a prefill server, which has two workers, and its decode servers."""
        self.bridge(prefill, "prefill")
        for decode in decodes:
            self.bridge(decode, "decode")
        await self.until(lambda: len(self.live()) == 2 + len(decodes))

    def _start(self, running: Any) -> None:
        task = asyncio.ensure_future(running)
        self.stack.push_async_callback(_cancel, task)

    def live(self) -> set[str]:
        """Workers that the conductor gives requests to."""
        cluster = self.core.cluster
        roles: tuple[Role, ...] = ("prefill", "decode", "kvstore")
        return {str(info.worker_id) for role in roles for info in cluster.accepting(role)}

    async def until_live(self, *servers: int) -> None:
        """Wait until exactly these servers take requests."""
        expected = {f"server-{i}" for i in servers}

        def live(part: str) -> set[str]:
            return {name.rpartition("-")[0] for name in self.live() if part in name}

        await self.until(lambda: live("prefill") == live("") == expected)

    async def until_indexed(self, server: int, n_blocks: int) -> None:
        """Wait until the conductor knows so many blocks of a server."""
        worker = f"server-{server}-kvstore"
        await self.until(lambda: self.core.index.n_blocks(worker) >= n_blocks)  # type: ignore[arg-type]

    async def events(
        self, prompt: Sequence[int], n_new: int = 8, **more: Any
    ) -> AsyncIterator[TokenEvent]:
        """Generate like a client, token by token."""
        self.n_requests += 1
        sampling = more.pop("sampling", GREEDY)
        stopping = more.pop("stopping", Stopping(max_new_tokens=n_new))
        request = GenerationRequest(
            request_id=f"cmpl-{self.n_requests}",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            stopping=stopping,
            **more,
        )
        async for event in self.gateway.generate(request):
            yield event

    async def generate(self, prompt: Sequence[int], n_new: int = 8, **more: Any) -> list[int]:
        async with asyncio.timeout(WITHIN_S):
            return [event.token async for event in self.events(prompt, n_new, **more)]

    async def n_cached(self, prompt: Sequence[int], **more: Any) -> int:
        async with asyncio.timeout(WITHIN_S):
            first, *_ = [event async for event in self.events(prompt, 1, **more)]
        return first.n_cached

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def settled(self) -> None:
        """Wait until nothing is held for any request, and audit the books."""
        sessions = [each.session for each in self.supervisors if each.session is not None]
        await self.until(lambda: not any(session.n_requests for session in sessions))
        await self.until(lambda: not any(self.core.n_requests.values()))
        self.core.check()
        for session in sessions:
            if session.server is not None:
                session.server.requests.check()


@asynccontextmanager
async def routed(*servers: PlainServer, **config: Any) -> AsyncIterator[RoutedServers]:
    """Route among servers, all of which are up."""
    async with AsyncExitStack() as stack:
        fleet = RoutedServers(stack, SchedulingConfig(**config))
        await fleet.open()
        for server in servers:
            fleet.bridge(server)
        await fleet.until_live(*range(len(servers)))
        yield fleet


async def _cancel(task: "asyncio.Future[Any]") -> None:
    task.cancel()
    await asyncio.wait([task])


@pytest.fixture
def prompt() -> list[int]:
    return list(range(100, 500))
