"""Bridge one server whenever it is up: describe it, run a session, wait for it to come back."""

import asyncio
from typing import NoReturn

import structlog

from halfmoon_metadata import MetadataStore
from halfmoon_protocol.blocks import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_runtime.channels.network import Network
from halfmoon_runtime.clock import SystemClock
from halfmoon_runtime.membership import Superseded
from halfmoon_runtime.task_errors import raising_task_errors
from halfmoon_runtime.worker.conductor_connections import RejectedByConductors
from halfmoon_runtime.worker.name_check import WorkerNameTaken
from halfmoon_servers.bridge.pair_releaser import PairReleaser
from halfmoon_servers.bridge.server_session import ServerDown, ServerSession
from halfmoon_servers.bridge.server_target import ServerTarget
from halfmoon_servers.client.server_client import ServerClient
from halfmoon_servers.client.server_description import ServerDescription
from halfmoon_servers.client.server_errors import ServerError
from halfmoon_servers.kv_events.server_salts import ServerSalts

log = structlog.get_logger()

#: Seconds between two looks at a server that is down, and after conductors refused it.
_RETRY_S = 1.0
_REFUSED_S = 10.0
#: Tokens of a block where no server states a size that Halfmoon allows.
DEFAULT_BLOCK_SIZE = 32


class ServerSupervisor:
    """Keep one server bridged."""

    def __init__(
        self,
        name: str,
        target: ServerTarget,
        client: ServerClient,
        salts: ServerSalts,
        releaser: PairReleaser,
        *,
        host_id: str,
        host: str,
        block_size: int,
    ) -> None:
        """Prepare to bridge a server.

        Args:
            name: of the server; its workers are named after it.
            target: where the server is, and its role.
            client: reaches it.
            salts: shared by all servers of the process.
            releaser: likewise; it gets the client of a decode server of a pair.
            host_id: the machine of this bridge.
            host: the address to listen on.
            block_size: tokens of a block of all servers; 0: as this server states.
        """
        self.name = name
        self.target = target
        self._client = client
        self._salts = salts
        self._releaser = releaser
        if target.role == "decode":
            releaser.clients.append(client)
        self._host_id = host_id
        self._host = host
        self._block_size = block_size
        #: The session while the server is up.
        self.session: ServerSession | None = None
        #: Sessions that were opened.
        self.n_sessions = 0

    async def run(self, network: Network, store: MetadataStore) -> NoReturn:
        """Bridge the server until cancelled.

        Raises:
            Superseded, WorkerNameTaken: another bridge of this name runs.
        """
        said = ""
        while True:
            pause_s = _RETRY_S
            try:
                description = await self._client.describe()
                said = ""
                await self._run_session(description, network, store)
            except (ServerError, ServerDown) as error:
                if str(error) != said:
                    log.warning("server_down", server=self.target.url, reason=str(error))
                    said = str(error)
            except RejectedByConductors:
                pause_s = _REFUSED_S
            except (Superseded, WorkerNameTaken):
                raise
            except Exception:
                log.exception("bridge_failed", server=self.target.url)
            await asyncio.sleep(pause_s)

    async def _run_session(
        self, description: ServerDescription, network: Network, store: MetadataStore
    ) -> None:
        self.session = ServerSession(
            self.name,
            self.target,
            description,
            self._client,
            bridge_layout(description, self._block_size),
            host_id=self._host_id,
            host=self._host,
            salts=self._salts,
            releaser=self._releaser,
            clock=SystemClock(),
        )
        self.n_sessions += 1
        log.info("server_up", server=self.target.url, model=description.model)
        try:
            with raising_task_errors(Superseded, WorkerNameTaken, RejectedByConductors, ServerDown):
                await self.session.run(network, store)
        finally:
            self.session = None


def bridge_layout(description: ServerDescription, block_size: int = 0) -> KvLayout:
    """Return the layout of a server's workers: its model and block size; the bytes stay there.

    Args:
        description: of the server.
        block_size: tokens of a block; 0: as the server states, if Halfmoon allows that.
    """
    stated = description.block_size
    if not block_size and stated is not None and MIN_BLOCK_SIZE <= stated <= MAX_BLOCK_SIZE:
        block_size = stated
    return KvLayout(
        model=f"served:{description.model}"[:512],
        n_layers=1,
        n_kv_heads=1,
        head_dim=1,
        dtype="float32",
        block_size=block_size or DEFAULT_BLOCK_SIZE,
    )
