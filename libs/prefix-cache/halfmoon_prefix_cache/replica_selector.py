"""Choose the kvstores to ask: those that fail are left out for a while.

`ReplicaHealth` decides which may be asked. Here they are asked, and the outcome goes to it, to the
log and to the metrics. A kvstore is well again only after bytes have come from it or gone to it:
one that answers and does not deliver is of no use.
"""

from collections import Counter
from collections.abc import Sequence

import structlog

from halfmoon_prefix_cache.kvstore_lease import KvstoreLease
from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import KvstoreAddress
from halfmoon_protocol.trace_context import TraceContext
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.kvstore_clients import (
    KvstoreClient,
    KvstoreClients,
    KvstoreDeclined,
    KvstoreUnavailable,
)
from halfmoon_scheduling.prefill.replica_health import ReplicaHealth

log = structlog.get_logger()


class KvstoreExcluded(KvstoreUnavailable):
    """A kvstore that is not asked: it failed of late, or another request is probing it."""


class ReplicaSelector:
    """Choose among all kvstores that one process uses."""

    def __init__(self, kvstores: KvstoreClients, layout: KvLayout, clock: Clock) -> None:
        self._kvstores = kvstores
        self._layout = layout
        self._clock = clock
        self.health = ReplicaHealth()
        #: Cached prefixes by how they were read.
        self.reads: Counter[str] = Counter(first=0, another=0, none=0)
        #: Blocks of those that were read, by the tier that had them when they were asked for.
        self.blocks: Counter[str] = Counter(memory=0, disk=0)

    async def client(self, address: KvstoreAddress) -> KvstoreClient:
        """Connect to a kvstore; if it had been left out, this is the probe.

        Raises:
            KvstoreUnavailable: it is left out, or can't be reached.
        """
        now = self._clock.now()
        if not self.health.may_ask(address, now):
            raise KvstoreExcluded(f"{address.worker_id} failed of late and is left out")
        self.health.asked(address, now)
        return await self._kvstores.client_for(address)

    async def lease(
        self,
        sources: Sequence[KvstoreAddress],
        hashes: tuple[BlockHash, ...],
        trace: TraceContext | None = None,
    ) -> KvstoreLease | None:
        """Lease the longest prefix of these blocks that one of the sources has.

        The sources are asked in order until one has all. None: no source has any.
        """
        best: KvstoreLease | None = None
        for address in self.health.usable(sources, self._clock.now()):
            lease = await self._lease_at(address, hashes, trace)
            if lease is None:
                continue
            if best is None or len(lease.places) > len(best.places):
                best, lease = lease, best
            if lease is not None:
                await lease.kvstore.release(lease.ticket)
            if len(best.places) == len(hashes):
                break
        return best

    async def _lease_at(
        self,
        address: KvstoreAddress,
        hashes: tuple[BlockHash, ...],
        trace: TraceContext | None,
    ) -> KvstoreLease | None:
        try:
            kvstore = await self.client(address)
            leased = await kvstore.lease(self._layout, hashes, trace)
        except KvstoreUnavailable as error:
            self.on_error(address, error)
            log.info("cache_not_used", kvstore=address.worker_id, reason=str(error))
            return None
        if not leased.places:
            self.answered(address)
            return None
        return KvstoreLease(
            kvstore,
            address,
            leased.ticket,
            leased.region,
            leased.places,
            leased.expires_s,
            leased.n_from_disk,
        )

    @property
    def n_left_out(self) -> int:
        """Kvstores that failed of late and are not asked for now."""
        return len(self.health.left_out(self._clock.now()))

    def answered(self, address: KvstoreAddress) -> None:
        """Take note that a kvstore did what was asked, or said in time why not."""
        if self.health.answered(address):
            log.info("kvstore_recovered", kvstore=address.worker_id)

    def failed(self, address: KvstoreAddress, reason: Exception) -> None:
        """Take note that a kvstore did not answer, did not deliver, or gave wrong bytes."""
        now = self._clock.now()
        was_out = self.health.is_paused(address, now)
        for_s = self.health.failed(address, now)
        if not was_out:  # several may be at it when it fails
            log.warning(
                "kvstore_left_out", kvstore=address.worker_id, for_s=for_s, reason=str(reason)
            )

    def on_error(self, address: KvstoreAddress, error: Exception) -> None:
        """Take note that an exchange ended in this error: the kvstore declined, or failed."""
        if isinstance(error, KvstoreDeclined):
            self.answered(address)
        elif not isinstance(error, KvstoreExcluded):
            self.failed(address, error)
