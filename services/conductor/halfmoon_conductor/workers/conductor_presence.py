"""Keep this conductor's record, by which a worker learns why no conductor connects to it."""

import asyncio
from contextlib import suppress

import msgspec

from halfmoon_conductor.workers.unreachable_workers import UnreachableWorkers
from halfmoon_metadata.store_interface import MetadataError, MetadataStore
from halfmoon_protocol.ids import ConductorId
from halfmoon_runtime.membership import LEASE_S, until_done
from halfmoon_runtime.worker.conductor_watch import (
    CONDUCTORS,
    MAX_REASON_CHARS,
    MAX_UNREACHABLE,
    ConductorRecord,
)

_PATIENCE_S = 2.0


class ConductorPresence:
    """Write and renew the record of one conductor."""

    def __init__(
        self, store: MetadataStore, conductor_id: ConductorId, unreachable: UnreachableWorkers
    ) -> None:
        self._store = store
        self._id = conductor_id
        self._key = CONDUCTORS + conductor_id
        self._unreachable = unreachable

    async def keep(self) -> None:
        """Renew the record until cancelled."""
        while True:
            await until_done(self._key, self._put)
            await asyncio.sleep(LEASE_S / 3)

    async def leave(self) -> None:
        """Remove the record; a metadata server that does not answer is not waited for."""
        with suppress(MetadataError, TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await asyncio.to_thread(self._store.delete, self._key)

    async def _put(self) -> None:
        value = msgspec.json.encode(self._record())
        await asyncio.to_thread(self._store.put, self._key, value, ttl_s=LEASE_S)

    def _record(self) -> ConductorRecord:
        found = self._unreachable.found()[:MAX_UNREACHABLE]
        reasons = {str(each.info.worker_id): each.reason[:MAX_REASON_CHARS] for each in found}
        return ConductorRecord(self._id, reasons)
