"""The live workers as the conductor knows them: records, loads, and what it has promised.

Bookkeeping without choices: what is planned at each prefill worker, what is held at each
decode worker, which kvstore is whose home, and the one KV layout that all share. Loads are
reports of a moment ago; what was promised since is added to them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from halfmoon_protocol.errors import LayoutMismatch
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.layout import KvLayout
from halfmoon_protocol.messages import (
    DecodeCost,
    DecodeLoad,
    KvstoreAddress,
    PrefillCost,
    PrefillLoad,
    WorkerInfo,
)
from halfmoon_scheduling.cost_model import CostModel
from halfmoon_scheduling.placement import (
    DecodeCandidate,
    Estimate,
    Job,
    PrefillCandidate,
    choose_home,
)


class UnfitWorker(Exception):
    """A worker that can't work with the others; the text names what differs, both ways."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A request's place in a prefill worker's queue."""

    predicted_s: float
    n_computed: int
    #: The kvstore that it reads from over the network, if it does.
    source: WorkerId | None


@dataclass(slots=True)
class _Prefill:
    info: WorkerInfo
    #: Our requests there, reserving ones included, in the order in which they will run.
    planned: dict[RequestId, _Planned] = field(default_factory=dict)
    #: When the first of `planned` became the first.
    head_since_s: float = 0.0
    #: Queued tokens that are not ours: other conductors'.
    foreign_tokens: int = 0

    @property
    def cost(self) -> PrefillCost:
        return self.info.prefill_cost or PrefillCost()


@dataclass(slots=True)
class _Held:
    """A request's claim on a decode worker."""

    n_pages: int
    n_tokens: int
    #: "asked": not in any load yet. "landing": counted as reserved. "running".
    state: str = "asked"


@dataclass(slots=True)
class _Decode:
    info: WorkerInfo
    #: Our requests there.
    held: dict[RequestId, _Held] = field(default_factory=dict)
    #: The last load with what happened since; estimates, never exact.
    free_pages: int = 0
    n_requests: int = 0
    context_tokens: int = 0
    #: It refused a reservation: until then, or until it reports, nothing new.
    full_until_s: float = float("-inf")

    @property
    def cost(self) -> DecodeCost:
        return self.info.decode_cost or DecodeCost()


class Cluster:
    """Live workers, their loads, and our claims on them."""

    def __init__(self, costs: CostModel, *, block_size: int | None = None) -> None:
        """No workers yet.

        Args:
            costs: learns from loads.
            block_size: tokens per block that every layout must have; None: any.
        """
        self._costs = costs
        self._block_size = block_size
        #: What all KV bytes mean: set by the first worker that has a layout, and forgotten
        #: with the last one.
        self.layout: KvLayout | None = None
        self.model = ""
        self._infos: dict[WorkerId, WorkerInfo] = {}
        #: Exactly the prefill workers of `_infos`; likewise `_decodes`.
        self._prefills: dict[WorkerId, _Prefill] = {}
        self._decodes: dict[WorkerId, _Decode] = {}
        #: Reads planned or under way at each kvstore; no value is 0.
        self.transfers: dict[WorkerId, int] = {}
        #: Home of each prefill worker, as far as asked for since kvstores last changed.
        self._homes: dict[WorkerId, WorkerId | None] = {}

    # -- who is here -------------------------------------------------------------------------

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._infos

    def get(self, worker_id: WorkerId) -> WorkerInfo | None:
        """A live worker's record."""
        return self._infos.get(worker_id)

    def workers(self) -> list[WorkerInfo]:
        """All live workers' records, in the order of their first joining."""
        return list(self._infos.values())

    def join(self, info: WorkerInfo) -> None:
        """A worker is there, or its record changed; its claims stay.

        Raises:
            UnfitWorker: it can't work with the others; nothing changes.
        """
        self._require_fit(info)
        self._infos[info.worker_id] = info
        if info.layout is not None and self.layout is None:
            self.layout = info.layout
        if info.layout is not None and not self.model:
            self.model = info.model
        if info.role == "prefill":
            if (prefill := self._prefills.get(info.worker_id)) is None:
                self._prefills[info.worker_id] = _Prefill(info)
            else:
                prefill.info = info
                self._homes.pop(info.worker_id, None)
        elif info.role == "decode":
            if (decode := self._decodes.get(info.worker_id)) is None:
                self._decodes[info.worker_id] = _Decode(info, free_pages=info.n_blocks)
            else:
                decode.info = info
        else:
            self._homes.clear()

    def leave(self, worker_id: WorkerId) -> None:
        """A worker is gone, and with it all claims on it."""
        info = self._infos.pop(worker_id)
        if info.role == "prefill":
            for request_id in list(self._prefills[worker_id].planned):
                self.release_prefill(worker_id, request_id, now=0.0)
            del self._prefills[worker_id]
            self._homes.pop(worker_id, None)
        elif info.role == "decode":
            del self._decodes[worker_id]
        else:
            self._homes.clear()
        self._costs.forget(worker_id)
        if all(other.layout is None for other in self._infos.values()):
            self.layout = None
            self.model = ""

    def home_of(self, prefill: WorkerId) -> WorkerId | None:
        """The kvstore that a live prefill worker keeps its blocks in."""
        if prefill not in self._homes:
            info = self._infos[prefill]
            kvstores = {
                other.worker_id: other.host
                for other in self._infos.values()
                if other.role == "kvstore" and not other.draining
            }
            self._homes[prefill] = choose_home(prefill, info.host, info.home_kvstore, kvstores)
        return self._homes[prefill]

    def address(self, kvstore: WorkerId) -> KvstoreAddress:
        """A live kvstore as a prefill worker reaches it."""
        info = self._infos[kvstore]
        return KvstoreAddress(kvstore, info.generation, info.commands)

    # -- who can take work -------------------------------------------------------------------

    def accepting(self, role: str) -> list[WorkerInfo]:
        """Live workers of a role that take new work."""
        return [info for info in self._infos.values() if info.role == role and not info.draining]

    def prefill_candidates(
        self, workers: Iterable[WorkerInfo], now: float
    ) -> list[PrefillCandidate]:
        """These prefill workers as placement sees them."""
        return [
            PrefillCandidate(
                info.worker_id,
                self._prefills[info.worker_id].cost,
                self.home_of(info.worker_id),
                self.queue_s(info.worker_id, now),
            )
            for info in workers
        ]

    def decode_candidates(self, workers: Iterable[WorkerInfo], now: float) -> list[DecodeCandidate]:
        """These decode workers as placement sees them; without those that said they are full."""
        return [
            DecodeCandidate(
                info.worker_id,
                decode.cost,
                decode.n_requests,
                decode.context_tokens,
                decode.free_pages,
            )
            for info in workers
            if (decode := self._decodes[info.worker_id]).full_until_s <= now
        ]

    def queue_s(self, worker_id: WorkerId, now: float) -> float:
        """Predicted seconds until a new request would begin: all queued, less what has run."""
        prefill = self._prefills[worker_id]
        queue_s = self._costs.prefill_s(
            worker_id, PrefillCost(0.0, prefill.cost.c1_s, 0.0), prefill.foreign_tokens, 0
        )
        for position, planned in enumerate(prefill.planned.values()):
            run_s = now - prefill.head_since_s if position == 0 else 0.0
            queue_s += max(0.0, planned.predicted_s - run_s)
        return queue_s

    # -- what is promised --------------------------------------------------------------------

    def plan(self, chosen: Estimate, decode: WorkerId, job: Job, now: float) -> None:
        """A request is to run at these two."""
        prefill = self._prefills[chosen.worker_id]
        if not prefill.planned:
            prefill.head_since_s = now
        source = chosen.source if chosen.transfer_blocks else None
        prefill.planned[job.request_id] = _Planned(
            chosen.prefill_s, job.n_tokens - chosen.n_blocks * job.block_size, source
        )
        if source is not None:
            self.transfers[source] = self.transfers.get(source, 0) + 1
        worker = self._decodes[decode]
        n_pages = -(-job.n_tokens // job.block_size)
        worker.held[job.request_id] = _Held(n_pages, job.n_tokens)
        worker.free_pages -= n_pages
        worker.n_requests += 1
        worker.context_tokens += job.n_tokens

    def landed(self, decode: WorkerId, request_id: RequestId, state: str) -> None:
        """A claim on a decode worker is "landing" or "running" now."""
        self._decodes[decode].held[request_id].state = state

    def release_prefill(self, worker_id: WorkerId, request_id: RequestId, now: float) -> None:
        """A request is no more in a prefill worker's queue; if it is there."""
        prefill = self._prefills.get(worker_id)
        if prefill is None or request_id not in prefill.planned:
            return
        if next(iter(prefill.planned)) == request_id:
            prefill.head_since_s = now
        source = prefill.planned.pop(request_id).source
        if source is not None:
            self.transfers[source] -= 1
            if not self.transfers[source]:
                del self.transfers[source]

    def release_decode(self, worker_id: WorkerId, request_id: RequestId) -> None:
        """A request holds nothing at a decode worker any more; if it did."""
        worker = self._decodes.get(worker_id)
        if worker is None or (held := worker.held.pop(request_id, None)) is None:
            return
        worker.free_pages = min(worker.info.n_blocks, worker.free_pages + held.n_pages)
        worker.n_requests = max(0, worker.n_requests - 1)
        worker.context_tokens = max(0, worker.context_tokens - held.n_tokens)
        if held.state != "asked":
            worker.full_until_s = float("-inf")

    def refused(self, worker_id: WorkerId, until_s: float) -> None:
        """A decode worker has no room: it gets nothing new until then, or until it reports."""
        self._decodes[worker_id].full_until_s = until_s

    # -- what they report --------------------------------------------------------------------

    def on_prefill_load(self, worker_id: WorkerId, load: PrefillLoad) -> None:
        """What is queued beyond our own is other conductors'."""
        if (prefill := self._prefills.get(worker_id)) is not None:
            ours = sum(planned.n_computed for planned in prefill.planned.values())
            prefill.foreign_tokens = max(0, load.queued_tokens - ours)

    def on_decode_load(self, worker_id: WorkerId, load: DecodeLoad) -> None:
        """Start again from what it says, plus what it can't know of yet."""
        if (worker := self._decodes.get(worker_id)) is None:
            return
        asked = [held for held in worker.held.values() if held.state == "asked"]
        coming = [held for held in worker.held.values() if held.state != "running"]
        worker.free_pages = load.free_pages - sum(held.n_pages for held in asked)
        worker.n_requests = load.n_running + load.n_reserved + len(asked)
        worker.context_tokens = load.context_tokens + sum(held.n_tokens for held in coming)
        worker.full_until_s = float("-inf")
        if load.n_running:
            self._costs.observe_step(
                worker_id, worker.cost, load.n_running, load.context_tokens, load.step_s
            )

    def planned_requests(self, worker_id: WorkerId) -> set[RequestId]:
        """Our requests at a live prefill worker."""
        return set(self._prefills[worker_id].planned)

    def held_requests(self, worker_id: WorkerId) -> set[RequestId]:
        """Our requests at a live decode worker."""
        return set(self._decodes[worker_id].held)

    def check(self) -> None:
        """Audit: each worker in the books of its role, one layout, transfers counted."""
        for role, ids in (("prefill", self._prefills), ("decode", self._decodes)):
            assert {i.worker_id for i in self._infos.values() if i.role == role} == set(ids)
        for info in self._infos.values():
            assert info.layout is None or info.layout == self.layout
        if self.layout is not None:
            assert any(info.layout is not None for info in self._infos.values())
        transfers: dict[WorkerId, int] = {}
        for prefill in self._prefills.values():
            for planned in prefill.planned.values():
                if planned.source is not None:
                    transfers[planned.source] = transfers.get(planned.source, 0) + 1
        assert transfers == self.transfers
        for worker_id, home in self._homes.items():
            assert worker_id in self._prefills
            assert home is None or self._infos[home].role == "kvstore"

    def _require_fit(self, info: WorkerInfo) -> None:
        if info.layout is None:
            if info.role != "kvstore":
                raise UnfitWorker(f"{info.role} worker {info.worker_id} states no KV layout")
            return
        if self._block_size not in (None, info.layout.block_size):
            raise UnfitWorker(
                f"block_size is {self._block_size} by the conductor's settings, "
                f"{info.layout.block_size} at {info.worker_id}"
            )
        if self.layout is not None:
            try:
                self.layout.require_same(info.layout, "the cluster", info.worker_id)
            except LayoutMismatch as error:
                raise UnfitWorker(str(error)) from None
        if self.model and info.model and info.model != self.model:
            raise UnfitWorker(
                f"model is {self.model!r} at the cluster, {info.model!r} at {info.worker_id}"
            )
