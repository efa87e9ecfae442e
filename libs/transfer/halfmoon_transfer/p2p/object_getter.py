"""One get: performs what its plan says, by transfers into the getter's buffers.

    record → plan → transfers → checksums → our shards into the record, as they come

A getter announces shards as they come, so it is a source long before it is done.
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
#: Between looks at the record while nobody can give what is missing.
_POLL_S = 0.05
#: How long a getter keeps to itself what it has from a replica: others can have it from there.
_ANNOUNCE_S = 0.2

#: Called with a number of bytes that are done.
ProgressCallback = Callable[[int], None]


class GetReport(msgspec.Struct, frozen=True):
    """How a get went."""

    n_bytes: int
    seconds: float
    #: Bytes that came from each segment, and were right.
    bytes_from: dict[str, int]
    #: Fetches that failed, and were done elsewhere or again.
    n_failures: int


class ObjectGetter:
    """One get: performs what its plan says, and tells the record."""

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
        #: When we last changed or read the record, and whether nothing came since.
        self._heard_at = time.monotonic()
        self._fresh = True
        #: Transfers that are over.
        self._over: queue.SimpleQueue[tuple[FetchShard, Transfer]] = queue.SimpleQueue()
        self._live: set[Transfer] = set()
        self._bytes_from: Counter[str] = Counter()
        self._n_failures = 0

    def run(self) -> GetReport:
        """Until all shards are here, and said to be."""
        started = time.monotonic()
        try:
            self._fetch_all()
        finally:
            self._stop()
        self._announce()
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
            self._start_what_can_be()
            if self._plan.n_in_flight:
                stuck_until = None
                self._land(*self._over.get())
                while not self._over.empty():
                    self._land(*self._over.get())
            else:
                now = time.monotonic()
                stuck_until = stuck_until or now + self._settings.patience_s
                if now >= stuck_until:
                    name = self._shared.newest.name
                    raise ShardUnavailable(f"object {name}: {self._plan.stuck_reason()}")
                time.sleep(_POLL_S)
                self._fresh = False

    def _start_what_can_be(self) -> None:
        """Fill the plan's room. Before gold is asked, we look what others have by now."""
        if time.monotonic() >= self._heard_at + _ANNOUNCE_S:
            self._announce()
        while not self._plan.full:
            self._plan.on_offers(self._shared.offers())
            fetch = self._plan.next(self._dice.randrange, gold_too=self._fresh)
            if fetch is not None:
                self._start(fetch)
            elif self._fresh:
                return
            else:
                self._announce()

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
        transfer.add_done_callback(lambda done: self._over.put((fetch, done)))

    def _land(self, fetch: FetchShard, transfer: Transfer) -> None:
        """One fetch is over: look at what came."""
        self._fresh = False
        self._live.discard(transfer)
        shard = self._shared.shards[fetch.shard]
        segment = fetch.source.segment
        try:
            transfer.result(0)
        except Rejected as error:
            # Its owner says so: asking again won't help.
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

    def _announce(self) -> None:
        self._heard_at = time.monotonic()
        self._fresh = True
        self._shared.announce(self._plan.here)

    def _stop(self) -> None:
        """Nothing writes into the buffers any more."""
        for transfer in self._live:
            transfer.cancel()
        for transfer in self._live:
            try:
                transfer.result()
            except TransferError:
                continue
