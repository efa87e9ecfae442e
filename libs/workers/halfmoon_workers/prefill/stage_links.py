"""Connect stage 0 of a group to the other stages: one link per worker, shared by all prompts.

The heartbeats of a link notice a stage that is lost or stopped within three seconds.
"""

import asyncio
from collections.abc import Callable

import structlog

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import StageAddress, ToFirstStage, ToFurtherStage
from halfmoon_runtime.channels.dropped_messages import record_drop
from halfmoon_runtime.channels.network import Network, PeerUnreachable, WorkerLink
from halfmoon_runtime.keyed_locks import KeyedLocks

log = structlog.get_logger()

#: Takes the messages of a stage about one prompt, and at last why its link is down.
OnStageMessage = Callable[[ToFirstStage | PeerUnreachable], None]


class StageLink:
    """Call one further stage over one link."""

    def __init__(self, address: StageAddress, link: WorkerLink) -> None:
        self.address = address
        self._link = link
        self._listeners: dict[RequestId, OnStageMessage] = {}
        self._down: PeerUnreachable | None = None
        self._reader = asyncio.create_task(self._read(), name=f"stage {address.worker_id}")

    @property
    def alive(self) -> bool:
        """True while the link is up."""
        return self._down is None

    def listen(self, request_id: RequestId, on_message: OnStageMessage) -> None:
        """Hand the stage's messages about a prompt to this function; at once if it is lost."""
        self._listeners[request_id] = on_message
        if self._down is not None:
            on_message(self._down)

    def forget(self, request_id: RequestId) -> None:
        """Hand on no more messages about a prompt."""
        self._listeners.pop(request_id, None)

    def send(self, message: ToFurtherStage) -> None:
        """Send a command; if the link is down, its listeners learn of that, not the caller.

        Raises:
            MessageTooLarge: nothing was sent.
        """
        try:
            self._link.send_now(message)
        except PeerUnreachable as error:
            self._link.break_off(str(error))

    async def close(self) -> None:
        """Close the link."""
        self._reader.cancel()
        await self._link.close()

    async def _read(self) -> None:
        try:
            while True:
                message = await self._link.receive()
                if not isinstance(message, ToFirstStage):
                    record_drop("unexpected", self.address.worker_id, type(message).__name__)
                elif (listener := self._listeners.get(message.request_id)) is not None:
                    listener(message)
        except PeerUnreachable as error:
            self._down = error
            log.info("stage_lost", stage=self.address.worker_id, reason=str(error))
            for listener in list(self._listeners.values()):
                listener(error)


class StageLinks:
    """Keep the links of one worker to the further stages of its group."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._links: dict[StageAddress, StageLink] = {}
        #: Held while a stage is dialled: one that hangs does not delay the others.
        self._dialling: KeyedLocks[WorkerId] = KeyedLocks()

    async def link(self, address: StageAddress) -> StageLink:
        """Return the link to this start of a worker, perhaps one that is down already."""
        async with self._dialling.lock(address.worker_id):
            link = self._links.get(address)
            if link is not None and link.alive:
                return link
            # Only links that are down: the address comes from a caller, and may be wrong.
            for stale in [key for key, known in self._links.items() if not known.alive]:
                await self._links.pop(stale).close()
            dialled = await self._network.dial(address.commands, key_id=address.key_id)
            self._links[address] = StageLink(address, dialled)
            return self._links[address]

    async def close(self) -> None:
        """Close all links."""
        for link in self._links.values():
            await link.close()
        self._links.clear()
