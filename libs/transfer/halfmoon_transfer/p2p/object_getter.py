"""Fetch one object: carry out a fetch plan by transfers into the getter's buffers.

    record → plan → transfers → checksums → completed shards into the record

A getter publishes shards as they arrive, so it is a source long before it is done.
"""

import logging
import queue
import random
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import Piece, Rejected, Transfer, TransferError
from halfmoon_transfer.p2p.fetch_plan import FetchPlan, FetchShard
from halfmoon_transfer.p2p.object_buffers import ObjectBuffers, object_checksum
from halfmoon_transfer.p2p.p2p_errors import ShardUnavailable
from halfmoon_transfer.p2p.p2p_settings import P2PSettings
from halfmoon_transfer.p2p.shared_record import SharedRecord

_log = logging.getLogger(__name__)
#: Interval of reading the record while no source has the missing shards.
_POLL_S = 0.05
#: Longest delay of publishing shards that came from a replica: the replica serves them too.
_ANNOUNCE_S = 0.2

#: Called with a number of bytes that were completed.
ProgressCallback = Callable[[int], None]


class GetReport(msgspec.Struct, frozen=True):
    """Sizes, time and sources of one finished get."""

    n_bytes: int
    seconds: float
    #: Verified bytes from each segment.
    bytes_from: dict[str, int]
    #: Fetches that failed and were repeated, there or at another source.
    n_failures: int


class ObjectGetter:
    """Carry out one get, and publish its progress in the record."""

    def __init__(
        self,
        engine: TransferEngine,
        shared: SharedRecord,
        buffers: ObjectBuffers,
        settings: P2PSettings,
        progress: ProgressCallback,
    ) -> None:
        self._engine = engine
        self._shared = shared
        self._buffers = buffers
        self._settings = settings
        self._progress = progress
        self._plan = FetchPlan(len(shared.shards), settings)
        self._dice = random.Random()
        #: When the record was last read or changed, and whether no shard was completed since.
        self._synced_at = time.monotonic()
        self._is_synced = True
        #: Transfers that have ended.
        self._ended: queue.SimpleQueue[tuple[FetchShard, Transfer]] = queue.SimpleQueue()
        self._live: set[Transfer] = set()
        self._bytes_from: Counter[str] = Counter()
        self._n_failures = 0

    def run(self) -> GetReport:
        """Fetch every shard and publish all of them in the record."""
        started = time.monotonic()
        try:
            self._fetch_all()
        finally:
            self._stop()
        self._sync()
        if self._plan.suspects:
            self._shared.remove_dead_holders(self._plan.suspects)
        return GetReport(
            n_bytes=self._shared.newest.n_bytes,
            seconds=time.monotonic() - started,
            bytes_from=dict(self._bytes_from),
            n_failures=self._n_failures,
        )

    def _fetch_all(self) -> None:
        stuck_until: float | None = None
        while not self._plan.done:
            self._fill()
            if self._plan.n_in_flight:
                stuck_until = None
                self._on_ended(*self._ended.get())
                while not self._ended.empty():
                    self._on_ended(*self._ended.get())
            else:
                now = time.monotonic()
                stuck_until = stuck_until or now + self._settings.patience_s
                if now >= stuck_until:
                    name = self._shared.newest.name
                    raise ShardUnavailable(f"object {name}: {self._plan.stuck_reason()}")
                time.sleep(_POLL_S)
                self._is_synced = False

    def _fill(self) -> None:
        """Start fetches until the plan is saturated; read the record before asking gold."""
        if time.monotonic() >= self._synced_at + _ANNOUNCE_S:
            self._sync()
        while not self._plan.is_saturated:
            self._plan.on_offers(self._shared.offers())
            fetch = self._plan.next(self._dice.randrange, gold_too=self._is_synced)
            if fetch is not None:
                self._start(fetch)
            elif self._is_synced:
                return
            else:
                self._sync()

    def _start(self, fetch: FetchShard) -> None:
        shard = self._shared.shards[fetch.shard]
        holder = self._shared.newest.holder(fetch.source)
        landing = self._buffers.landings[shard.buffer]
        assert holder is not None and landing is not None
        place = holder.places[shard.buffer]
        assert place is not None, "checked when the record was read"
        piece = Piece(
            landing, shard.offset, place.region, place.offset + shard.offset, shard.length
        )
        transfer = self._engine.submit("read", [piece], self._settings.shard_timeout_s)
        self._live.add(transfer)
        transfer.add_done_callback(lambda done: self._ended.put((fetch, done)))

    def _on_ended(self, fetch: FetchShard, transfer: Transfer) -> None:
        """Verify the bytes of a fetch that has ended."""
        self._is_synced = False
        self._live.discard(transfer)
        shard = self._shared.shards[fetch.shard]
        segment = fetch.source.segment
        try:
            transfer.result(0)
        except Rejected as error:
            # The owner of the region refuses: a retry there won't help.
            self._fail(fetch, str(error), gone=True)
        except TransferError as error:
            self._fail(fetch, str(error), gone=False)
        else:
            if (
                object_checksum(self._buffers.view(shard))
                != self._shared.newest.checksums[shard.index]
            ):
                reason = f"shard {shard.index} came with another checksum than was published"
                self._fail(fetch, reason, gone=False)
                return
            self._plan.on_fetched(fetch.shard)
            self._bytes_from[segment] += shard.length
            self._progress(shard.length)

    def _fail(self, fetch: FetchShard, reason: str, *, gone: bool) -> None:
        self._n_failures += 1
        self._plan.on_failed(fetch.shard, reason, gone=gone)
        _log.info("shard %d from %s: %s", fetch.shard, fetch.source.segment, reason)
        if gone:
            self._shared.remove_dead_holders({fetch.source})

    def _sync(self) -> None:
        """Publish our shards and read the offers of other holders."""
        self._synced_at = time.monotonic()
        self._is_synced = True
        self._shared.publish_shards(self._plan.completed_shards)

    def _stop(self) -> None:
        """Cancel all transfers and wait until none of them writes into the buffers."""
        for transfer in self._live:
            transfer.cancel()
        for transfer in self._live:
            try:
                transfer.result()
            except TransferError:
                continue
