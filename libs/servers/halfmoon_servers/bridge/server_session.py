"""Keep a server's workers in the cluster from the moment it is up until it is down.

Each session opens ports and registers records of a new generation. A server is down when it does
not answer a probe of its health; its ports close then, so that conductors notice at once, and
place its requests elsewhere.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import structlog

from halfmoon_metadata import MetadataStore
from halfmoon_protocol import features
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import DecodeCost, PrefillCost, Role, WorkerInfo
from halfmoon_protocol.versions import MAX_VERSION, MIN_VERSION
from halfmoon_runtime.channels.network import Network, Port
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.membership import Membership, next_generation
from halfmoon_runtime.worker.conductor_watch import ConductorWatch
from halfmoon_runtime.worker.message_loop import serve_messages
from halfmoon_runtime.worker.name_check import check_name
from halfmoon_servers.bridge.bridge_port import BridgePort
from halfmoon_servers.bridge.bridged_requests import BridgedRequests
from halfmoon_servers.bridge.bridged_server import BridgedServer
from halfmoon_servers.bridge.cache_view import CacheView
from halfmoon_servers.bridge.pair_releaser import PairReleaser
from halfmoon_servers.bridge.server_target import ServerTarget
from halfmoon_servers.client.server_client import ServerClient
from halfmoon_servers.client.server_description import ServerDescription
from halfmoon_servers.client.server_errors import ServerError
from halfmoon_servers.kv_events.block_translator import BlockTranslator
from halfmoon_servers.kv_events.event_endpoint import EventEndpoint
from halfmoon_servers.kv_events.event_source import KvEventSource
from halfmoon_servers.kv_events.followed_cache import follow_cache
from halfmoon_servers.kv_events.server_salts import ServerSalts

log = structlog.get_logger()

#: Seconds between two reads of the server's load.
_LOAD_S = 1.0
#: Pages of a server that does not tell the size of its cache.
_UNKNOWN_BLOCKS = 65_536
#: Roles of the workers of a server, in the order in which they join.
#: Servers do not stream log probabilities of prompts.
_FEATURES = tuple(name for name in features.ALL if name != features.PROMPT_LOGPROBS)
_ROLES: dict[str, tuple[Role, ...]] = {
    "both": ("kvstore", "decode", "prefill"),
    "prefill": ("kvstore", "prefill"),
    "decode": ("decode",),
}


class ServerDown(Exception):
    """A server does not answer; the text names it."""


class ServerSession:
    """One start of a server, as its workers."""

    def __init__(
        self,
        name: str,
        target: ServerTarget,
        description: ServerDescription,
        client: ServerClient,
        layout: KvLayout,
        *,
        host_id: str,
        host: str,
        salts: ServerSalts,
        releaser: PairReleaser,
        clock: Clock,
    ) -> None:
        """Prepare a session; `run` opens it.

        Args:
            name: of the server; its workers are named after it.
            target: where the server is, and its role.
            description: as the server describes itself now.
            client: reaches the server.
            layout: the model's fingerprint and the block size, for block hashes.
            host_id: the machine of this bridge.
            host: the address to listen on.
            salts: names salts as the server takes them.
            releaser: frees blocks of prefill servers that no decode server fetches.
            clock: tells the time.
        """
        self._name = name
        self._target = target
        self._description = description
        self._client = client
        self._layout = layout
        self._host_id = host_id
        self._host = host
        self._salts = salts
        self._releaser = releaser
        self._clock = clock
        self._server: BridgedServer | None = None
        self._memberships: list[Membership] = []
        self._down = asyncio.Event()
        self._probe: asyncio.Future[bool] | None = None

    @property
    def n_requests(self) -> int:
        """Requests at the server."""
        return 0 if self._server is None else len(self._server.requests)

    @property
    def server(self) -> BridgedServer | None:
        """The workers, once they are open."""
        return self._server

    async def run(self, network: Network, store: MetadataStore) -> None:
        """Serve until the server is down, or until cancelled.

        Raises:
            ServerDown: the server does not answer.
            RejectedByConductors: no conductor uses it; the text says why.
        """
        async with AsyncExitStack() as stack:
            ports = await self._open_ports(network, store, stack)
            n_blocks = self._description.n_blocks or _UNKNOWN_BLOCKS
            endpoints = self._endpoints()
            cache = None
            if "kvstore" in ports:
                port = ports["kvstore"].port
                cache = CacheView(port, self._layout, n_blocks, len(endpoints))
                log.info("kv_cache", server=self._target.url, known_by=_source(endpoints))
            server = BridgedServer(
                self._description.model,
                ports,
                BridgedRequests(n_blocks, self._layout.block_size),
                self._client,
                self._salts,
                self._clock,
                cache,
                self._releaser,
            )
            self._server = server
            async with asyncio.TaskGroup() as tasks:
                server.open(tasks, self._is_alive)
                running = [
                    tasks.create_task(self._serve(role, side.port, server))
                    for role, side in ports.items()
                ]
                running.append(tasks.create_task(self._report(server)))
                running.append(tasks.create_task(self._watch_load(server)))
                if cache is not None:
                    running += [
                        tasks.create_task(self._follow(cache, i, endpoint))
                        for i, endpoint in enumerate(endpoints)
                    ]
                async with self._registered(store, ports, tasks, running):
                    await self._down.wait()
                raise ServerDown(f"{self._target.url} does not answer")

    async def drain(self) -> None:
        """Take no new requests, and wait for those that are here."""
        if self._server is not None:
            await self._server.drain()

    # -- opening -----------------------------------------------------------------------------

    async def _open_ports(
        self, network: Network, store: MetadataStore, stack: AsyncExitStack
    ) -> dict[Role, BridgePort]:
        ports: dict[Role, BridgePort] = {}
        for role in _ROLES[self._target.role]:
            worker_id = WorkerId(f"{self._name}-{role}")
            await check_name(store, network, worker_id)
            port = await network.bind(worker_id, host=self._host)
            stack.push_async_callback(port.close)
            generation = await next_generation(store, worker_id)
            ports[role] = BridgePort(port, self._info(role, worker_id, generation, port))
        return ports

    def _info(self, role: Role, worker_id: WorkerId, generation: int, port: Port) -> WorkerInfo:
        description, is_pair = self._description, self._target.role != "both"
        return WorkerInfo(
            worker_id=worker_id,
            role=role,
            generation=generation,
            host=self._host_id,
            commands=port.commands,
            events=port.events,
            key_id=port.key_id,
            min_version=MIN_VERSION,
            max_version=MAX_VERSION,
            features=_FEATURES,
            layout=self._layout,
            model=description.model,
            max_context=description.max_model_len,
            n_blocks=description.n_blocks or _UNKNOWN_BLOCKS,
            prefill_cost=PrefillCost() if role == "prefill" else None,
            decode_cost=DecodeCost() if role == "decode" else None,
            # The prefill server of a pair is bound to its own cache, and to no decode server.
            home_kvstore=WorkerId(f"{self._name}-kvstore") if role == "prefill" else None,
            http=self._target.url,
            computes_with=f"{description.kind} {description.version}".strip(),
            server=self._name if role == "kvstore" or not is_pair else "",
        )

    def _endpoints(self) -> tuple[EventEndpoint, ...]:
        if self._target.events:
            return (EventEndpoint(self._target.events, self._target.replay or None),)
        if self._description.block_size != self._layout.block_size:
            return ()  # its blocks are none of ours
        return self._description.event_endpoints

    @asynccontextmanager
    async def _registered(
        self,
        store: MetadataStore,
        ports: dict[Role, BridgePort],
        tasks: asyncio.TaskGroup,
        running: list[asyncio.Task[None]],
    ) -> AsyncIterator[None]:
        """Keep the records for the length of a block; then end the tasks, and close the ports."""
        try:
            for side in ports.values():
                membership = Membership(store, side.info)
                self._memberships.append(membership)
                await membership.join()
                running.append(tasks.create_task(membership.keep_alive()))
                running.append(tasks.create_task(_watch_conductors(store, side)))
            yield
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            # First the ports: a closed connection is noticed sooner than a missing record.
            for side in ports.values():
                await side.port.close()
            for membership in self._memberships:
                await membership.leave()

    # -- while it is up ----------------------------------------------------------------------

    async def _serve(self, role: Role, port: Port, server: BridgedServer) -> None:
        await serve_messages(port, lambda peer, message: server.handle(role, peer, message))

    async def _report(self, server: BridgedServer) -> None:
        while True:
            await server.housekeep()
            await server.pace.wait(idle=server.requests.idle.is_set())

    async def _watch_load(self, server: BridgedServer) -> None:
        """Read the server's load; a server that does not answer is probed."""
        while True:
            try:
                load = await self._client.load()
            except ServerError as error:
                if not await self._is_alive():
                    return
                log.debug("load_unknown", server=self._target.url, reason=str(error))
            else:
                server.requests.on_load(load.kv_usage)
            await asyncio.sleep(_LOAD_S)

    async def _follow(self, cache: CacheView, i: int, endpoint: EventEndpoint) -> None:
        """Take over the KV events of one data-parallel rank."""
        translator = BlockTranslator(self._layout.model, self._layout.block_size, self._salts)
        async with aclosing(follow_cache(KvEventSource(endpoint), translator)) as changes:
            async for events in changes:
                cache.on_events(i, events)
                await cache.published()

    async def _is_alive(self) -> bool:
        """Probe the server; all callers at a time share one probe."""
        if self._down.is_set():
            return False
        if self._probe is None:
            self._probe = asyncio.ensure_future(self._client.healthy())
        probe = self._probe
        is_alive = await asyncio.shield(probe)
        if self._probe is probe:
            self._probe = None
        if not is_alive:
            self._down.set()
        return is_alive


def _source(endpoints: tuple[EventEndpoint, ...]) -> str:
    if not endpoints:
        return "what was sent there: it publishes no KV events of this block size"
    return f"its KV events at {', '.join(endpoint.endpoint for endpoint in endpoints)}"


async def _watch_conductors(store: MetadataStore, side: BridgePort) -> None:
    """Log that no conductor connects to a port; the process has no stage for each of its ports."""
    watch = ConductorWatch(
        store,
        side.info,
        lambda: len(side.conductors.owners.conductors),
        lambda problem: None,
        asyncio.get_running_loop().time,
    )
    await watch.run()
