"""How a kvstore leaves: it takes no more puts, what only it has is kept, then it stops.

    POST /drain    moves what only this node has, disk included, to others; then the process ends
    SIGTERM        with a disk: what only memory has is written there, for the next start;
                   without one: moved to others; for `drain_s` at the most

Reads are served until the end.
"""

import asyncio
from contextlib import suppress
from typing import Annotated

import msgspec

from halfmoon_kvstore.drain.drain_migration import DrainMigration
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_kvstore.worker import KvstoreWorker
from halfmoon_runtime.lifecycle import Service
from halfmoon_runtime.observability.metrics import MetricSnapshot, by_label
from halfmoon_runtime.observability.operator_http import (
    OperatorHttp,
    OperatorHttpError,
    OperatorRequest,
)

_DEADLINE_S = 600.0
_LOOK_S = 0.05
#: Seconds for whoever watches a drain to hear of its end.
_TOLD_S = 1.0


class _DrainBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    #: Seconds after which the node leaves with what it still has.
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] = _DEADLINE_S


class DrainController:
    """One node's end."""

    def __init__(
        self,
        worker: KvstoreWorker,
        moving: DrainMigration,
        settings: KvstoreSettings,
        service: Service,
    ) -> None:
        self._worker = worker
        self._moving = moving
        self._settings = settings
        self._service = service
        #: What was ordered by HTTP.
        self._ordered: asyncio.Task[None] | None = None
        #: Set when somebody was told how it ended.
        self._told = asyncio.Event()

    def register(self, http: OperatorHttp) -> None:
        """Answer operators there."""
        http.add("GET", "/drain", self.progress)
        http.add("POST", "/drain", self.start)

    async def progress(self, question: OperatorRequest) -> object:
        """How far it is."""
        if self._moving.progress.state in ("done", "incomplete"):
            self._told.set()
        return self._moving.progress

    async def start(self, question: OperatorRequest) -> object:
        """Begin to move everything, then leave; a second order changes nothing."""
        try:
            body = msgspec.json.decode(question.body or b"{}", type=_DrainBody)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OperatorHttpError(400, f"the body is no drain: {error}") from None
        if self._ordered is None and not self._service.stopping.is_set():
            self._moving.begin()
            self._ordered = self._service.spawn(self._leave(body.deadline_s))
        return self._moving.progress

    async def shut_down(self) -> None:
        """The process is to end: keep what can be kept."""
        limit_s = self._settings.drain_s
        if self._ordered is not None:
            await asyncio.wait([self._ordered], timeout=limit_s)
            return
        await self._worker.stop_accepting()
        until_s = asyncio.get_running_loop().time() + limit_s
        if self._worker.block_store.disk is not None:
            await self._worker.block_store.write_back_all(limit_s)
        elif limit_s:
            await self._moving.run(limit_s)
        await self._readers_gone(until_s)

    def metrics(self) -> MetricSnapshot:
        """What the metrics show."""
        progress = self._moving.progress
        return {
            "halfmoon_kvstore_drain_blocks": (
                "Blocks that only this node had when it began to leave.",
                by_label("state", {"moved": progress.n_moved, "left": progress.n_left}),
            )
        }

    async def _leave(self, deadline_s: float) -> None:
        await self._worker.stop_accepting()
        until_s = asyncio.get_running_loop().time() + deadline_s
        await self._moving.run(deadline_s)
        await self._readers_gone(until_s)
        if self._worker.block_store.disk is not None and self._moving.progress.n_left:
            await self._worker.block_store.write_back_all(self._settings.drain_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(_TOLD_S):
                await self._told.wait()
        self._service.stopping.set()

    async def _readers_gone(self, until_s: float) -> None:
        """Let those who read here finish, until then at the latest."""
        loop, tiers = asyncio.get_running_loop(), self._worker.tiers
        while True:
            if tiers is None or not tiers.memory.n_leased or loop.time() >= until_s:
                return
            await asyncio.sleep(_LOOK_S)
