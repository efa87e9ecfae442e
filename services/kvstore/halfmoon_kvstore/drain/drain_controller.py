"""Drain a kvstore before it stops: refuse puts, and save or move the blocks that only it has.

    POST /drain    moves blocks that only this node has, disk included, to other nodes; then the
                   process ends
    SIGTERM        with a disk: writes blocks that only memory has to it, for the next start;
                   without a disk: moves them to other nodes; for at most `drain_s`

Reads are served until the end.
"""

import asyncio
from contextlib import suppress
from typing import Annotated

import msgspec

from halfmoon_kvstore.drain.drain_migration import DrainMigration, DrainProgress
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_kvstore.worker import KvstoreWorker
from halfmoon_runtime.lifecycle import Service
from halfmoon_runtime.observability.metrics import MetricSnapshot, by_label
from halfmoon_runtime.observability.operator_http import (
    OperatorHttp,
    OperatorRequest,
    decode_body,
)
from halfmoon_runtime.observability.route_doc import RouteDoc

_DEADLINE_S = 600.0
_POLL_S = 0.05
#: Seconds in which a drain's end can be read, and those once its progress was read.
_READ_END_S = 1.0
_WATCHED_END_S = 10.0


class DrainBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the drain may take."""

    #: Seconds after which the node leaves, with its remaining blocks.
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] = _DEADLINE_S


class DrainController:
    """Drain one node, by order of an operator or when the process is told to stop."""

    def __init__(
        self,
        worker: KvstoreWorker,
        migration: DrainMigration,
        settings: KvstoreSettings,
        service: Service,
    ) -> None:
        self._worker = worker
        self._migration = migration
        self._settings = settings
        self._service = service
        #: The drain that an operator ordered by HTTP.
        self._ordered_drain: asyncio.Task[None] | None = None
        #: Whether an operator has asked for its progress.
        self._is_watched = False
        #: Set when an operator has read the end of the drain.
        self._end_was_read = asyncio.Event()

    def register(self, http: OperatorHttp) -> None:
        """Add the routes to the HTTP server."""
        http.add("GET", "/drain", self.progress, RouteDoc(answer=DrainProgress))
        start = RouteDoc(body=DrainBody, body_is_required=False, answer=DrainProgress)
        http.add("POST", "/drain", self.start, start)

    async def progress(self, request: OperatorRequest) -> object:
        """Return the progress of the drain."""
        self._is_watched = True
        if self._migration.progress.state in ("done", "incomplete"):
            self._end_was_read.set()
        return self._migration.progress

    async def start(self, request: OperatorRequest) -> object:
        """Start to move all blocks, then leave; a second request changes nothing."""
        body = decode_body(request.body or b"{}", DrainBody)
        if self._ordered_drain is None and not self._service.stopping.is_set():
            self._migration.begin()
            self._ordered_drain = self._service.spawn(self._leave(body.deadline_s))
        return self._migration.progress

    async def shut_down(self) -> None:
        """Save or move blocks before the process ends."""
        limit_s = self._settings.drain_s
        if self._ordered_drain is not None:
            await asyncio.wait([self._ordered_drain], timeout=limit_s)
            return
        await self._worker.stop_accepting()
        until_s = asyncio.get_running_loop().time() + limit_s
        if self._worker.block_store.disk is not None:
            await self._worker.block_store.write_back_all(limit_s)
        elif limit_s:
            await self._migration.run(limit_s)
        await self._wait_for_readers(until_s)

    def metrics(self) -> MetricSnapshot:
        """Return the progress as metrics."""
        progress = self._migration.progress
        return {
            "halfmoon_kvstore_drain_blocks": (
                "Blocks that only this node had when it began to leave.",
                by_label("state", {"moved": progress.n_moved, "left": progress.n_left}),
            )
        }

    async def _leave(self, deadline_s: float) -> None:
        await self._worker.stop_accepting()
        until_s = asyncio.get_running_loop().time() + deadline_s
        await self._migration.run(deadline_s)
        await self._wait_for_readers(until_s)
        if self._worker.block_store.disk is not None and self._migration.progress.n_left:
            await self._worker.block_store.write_back_all(self._settings.drain_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(_WATCHED_END_S if self._is_watched else _READ_END_S):
                await self._end_was_read.wait()
        self._service.stopping.set()

    async def _wait_for_readers(self, until_s: float) -> None:
        """Wait until no block is leased, until `until_s` at the latest."""
        loop, tiers = asyncio.get_running_loop(), self._worker.tiers
        while True:
            if tiers is None or not tiers.memory.n_leased or loop.time() >= until_s:
                return
            await asyncio.sleep(_POLL_S)
