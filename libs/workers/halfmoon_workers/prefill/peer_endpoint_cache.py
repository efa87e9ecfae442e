"""Look up the endpoints of members before there are bytes for them, in case of an outage.

The address of a peer is in the metadata server, and is remembered once it was read. A peer whose
address is first needed during an outage of that server can't be reached, however well it is. Where
containers come with new names all the time, those that left must be forgotten again.
"""

import asyncio
import time
from collections.abc import Callable, Iterable

import structlog

from halfmoon_metadata.store_interface import MetadataError, MetadataStore
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_protocol.regions import Region
from halfmoon_runtime.membership import list_members
from halfmoon_runtime.observability.metrics import MetricSnapshot, by_label
from halfmoon_transfer import Lost, TransferEngine, TransferError

log = structlog.get_logger()

#: Seconds between two looks at the list of members, if they are few.
REFRESH_S = 2.0
#: The same for each of many members. All of them look at all records, of some 2 kB each, which
#: would be most of what the metadata server sends.
REFRESH_S_PER_MEMBER = 0.1
#: Seconds between two attempts to look up a peer that a request waits for.
_MEET_AGAIN_S = 0.2
#: Seconds after which a peer that is no member any more is forgotten: longer than a member stays
#: unseen while it starts again, or while the metadata server lost it.
FORGET_AFTER_S = 300.0


async def meet_peer(transfer: TransferEngine, region: Region, may_wait: Callable[[], bool]) -> None:
    """Look a region's owner up; wait while the metadata server is away, or has lost its record.

    An owner that is not met is left for the transfer to say so.

    Args:
        transfer: remembers how the owner is reached.
        region: that will be accessed.
        may_wait: returns whether there is time left.
    """
    while not transfer.knows_peer(region.segment, region.generation) and may_wait():
        try:
            await asyncio.to_thread(transfer.resolve_peer, region.segment, region.generation)
        except Lost as error:
            log.info("peer_not_met", segment=region.segment, reason=str(error))
            await asyncio.sleep(_MEET_AGAIN_S)
        except TransferError:  # it is another start now
            return


class PeerEndpointCache:
    """Look up each start of each other member soon after it has joined; forget those that left.

    Each look is at all of them, not at those that are new: a member's record may come later than
    its membership, and what could not be read is asked for again.

    Args:
        store: the metadata server; while it is away, what is known stays known.
        transfer: what remembers how they are reached.
        own: this worker.
        look_s: seconds between two looks, more where there are many members.
        forget_after_s: seconds after which a peer that is no member any more is forgotten, with
            the connections to it. Only looks that the server answered count.
        now: returns seconds that only grow.
    """

    def __init__(
        self,
        store: MetadataStore,
        transfer: TransferEngine,
        own: WorkerId,
        *,
        look_s: float = REFRESH_S,
        forget_after_s: float = FORGET_AFTER_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._transfer = transfer
        self._own = own
        self._look_s = look_s
        self._forget_after_s = forget_after_s
        self._now = now
        self._seen_s: dict[WorkerId, float] = {}
        self._n_looks = {"done": 0, "failed": 0}

    async def keep(self) -> None:
        """Look up all members at intervals, until cancelled."""
        while True:
            self._n_looks["done" if await self._look() else "failed"] += 1
            await asyncio.sleep(self.pause_s())

    def pause_s(self) -> float:
        """Return the seconds until the next look."""
        return max(self._look_s, REFRESH_S_PER_MEMBER * len(self._seen_s))

    def metrics(self) -> MetricSnapshot:
        """Return what the metrics show."""
        return {
            "halfmoon_prefill_member_refreshes_total": (
                "Looks at all members: done, or failed to learn of each how it is reached.",
                by_label("result", self._n_looks),
            )
        }

    async def _look(self) -> bool:
        """Look up all members; return whether each is known now."""
        try:
            there = await list_members(self._store)
        except MetadataError:
            return False  # membership logs it
        others = [info for worker_id, info in there.items() if worker_id != self._own]
        return await asyncio.to_thread(self._meet_and_forget, others)

    def _meet_and_forget(self, others: list[WorkerInfo]) -> bool:
        """Look up these members; return whether all are known. Blocks on store and connections."""
        now_s = self._now()
        self._seen_s.update((info.worker_id, now_s) for info in others)
        gone = [w for w, at_s in self._seen_s.items() if now_s - at_s > self._forget_after_s]
        for worker_id in gone:
            self._transfer.release_peer(worker_id)
            del self._seen_s[worker_id]
            log.info("forgotten", worker_id=worker_id, reason="no member any more")
        return self._meet(others)

    def _meet(self, others: Iterable[WorkerInfo]) -> bool:
        all_known = True
        for info in others:
            try:
                self._transfer.resolve_peer(info.worker_id, info.generation)
            except TransferError as error:
                # Its record may come later than its membership, or it is just leaving.
                log.debug("not_met", worker_id=info.worker_id, reason=str(error))
                all_known = False
        return all_known
