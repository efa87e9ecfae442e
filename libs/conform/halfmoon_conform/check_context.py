"""Give one check its subject and its ends of the wire, and close what it opened."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from halfmoon_conform.blocks import SMALL_LAYOUT, BlockChain, make_chain
from halfmoon_conform.peers.caller import Caller
from halfmoon_conform.peers.curve_sockets import Context
from halfmoon_conform.peers.event_listener import EventListener
from halfmoon_conform.peers.transfer_connection import RegionMap, TransferConnection
from halfmoon_conform.subject.metadata_server import MetadataServer
from halfmoon_conform.subject.subject import Subject, member_key
from halfmoon_conform.verdict import CheckFailed, CheckSkipped

_POLL_S = 0.05


class CheckContext:
    """Hold what one check works with."""

    def __init__(
        self,
        check_id: str,
        subject: Subject,
        sockets: Context,
        seed: int,
        metadata_server: MetadataServer | None,
        stack: AsyncExitStack,
        answer_s: float,
    ) -> None:
        self.check_id = check_id
        self.subject = subject
        self.sockets = sockets
        #: None: the metadata server is not the kit's, and can't be taken away.
        self._metadata_server = metadata_server
        self.chance = random.Random(f"{seed} {check_id}")
        self._stack = stack
        #: Seconds for an answer and for a condition.
        self._answer_s = answer_s
        self._n_names = 0

    @property
    def metadata_server(self) -> MetadataServer:
        """Return the metadata server, to take it away.

        Raises:
            CheckSkipped: it is not the kit's.
        """
        if self._metadata_server is None:
            raise CheckSkipped("the metadata server is not the kit's own")
        return self._metadata_server

    @property
    def layout(self) -> dict[str, Any]:
        """The layout of the subject's blocks, or the kit's where it has none yet."""
        layout: dict[str, Any] | None = self.subject.record.get("layout")
        return layout or SMALL_LAYOUT

    def name(self, what: str) -> str:
        """Return an id that no other check uses."""
        self._n_names += 1
        return f"conform-{what}-{self._n_names}-{self.chance.randrange(2**40):010x}"

    def blocks(self, n_blocks: int, parent: bytes | None = None) -> BlockChain:
        """Make blocks of the subject's layout."""
        return make_chain(self.chance, self.layout, n_blocks, parent)

    async def connect(self, name: str | None = None, *, hello: bool = True) -> Caller:
        """Open a connection to the subject's commands, and say hello unless told not to."""
        subject = self.subject
        caller = Caller(
            self.sockets, subject.record["commands"], subject.cluster_key, self._answer_s
        )
        self._stack.push_async_callback(caller.close)
        if hello:
            await caller.greet(name or self.name("conductor"))
        return caller

    async def listen(self) -> EventListener:
        """Subscribe to what the subject publishes; a first load report has arrived."""
        subject = self.subject
        listener = EventListener(
            self.sockets,
            subject.record["events"],
            subject.worker_id,
            subject.cluster_key,
            self._answer_s,
        )
        self._stack.push_async_callback(listener.close)
        return listener

    async def dial(self, region: RegionMap | None = None) -> TransferConnection:
        """Open a transfer connection to the subject's segment."""
        segment = await self.subject.segment()
        opened = await TransferConnection.open(
            segment["endpoints"]["tcp"]["address"],
            segment["name"] if region is None else region["segment"],
            segment["generation"] if region is None else region["generation"],
            cluster_key=self.subject.cluster_key,
        )
        self._stack.push_async_callback(opened.close)
        return opened

    async def dial_plain(self) -> TransferConnection:
        """Open a transfer connection that has said nothing yet."""
        segment = await self.subject.segment()
        opened = await TransferConnection.dial(segment["endpoints"]["tcp"]["address"])
        self._stack.push_async_callback(opened.close)
        return opened

    async def renewed(self) -> None:
        """Wait until the subject has renewed its record: its start is over then.

        Raises:
            CheckSkipped: the metadata server is not the kit's, which counts writes.
        """
        server, key = self.metadata_server, member_key(self.subject.worker_id)

        async def twice() -> bool:
            return server.n_writes(key) > 1

        await self.until(twice, "its record is renewed")

    async def until(
        self,
        holds: Callable[[], Awaitable[Any]],
        what: str,
        within_s: float | None = None,
    ) -> Any:
        """Wait until a condition holds, and return its value.

        Raises:
            CheckFailed: it does not hold in time.
        """
        within_s = 1.5 * self._answer_s if within_s is None else within_s
        deadline = asyncio.get_running_loop().time() + within_s
        while not (found := await holds()):
            if asyncio.get_running_loop().time() > deadline:
                raise CheckFailed(f"{what}: not within {within_s:g} s")
            await asyncio.sleep(_POLL_S)
        return found

    def on_end(self, close: Callable[[], Awaitable[None]]) -> None:
        """Call this when the check ends."""
        self._stack.push_async_callback(close)

    def remove_on_end(self, key: str) -> None:
        """Remove a record of the kit's own when the check ends: the service may run on."""

        async def remove() -> None:
            await asyncio.to_thread(self.subject.store.delete, key)

        self.on_end(remove)
