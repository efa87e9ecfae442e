"""The live workers as the conductor knows them: who they are, and whether they fit together.

Bookkeeping without choices: records, which kvstore is whose home, and the one KV layout that
all share. What is queued at prefill workers is in `prefill_pool`, what is held at decode
workers in `decode_pool`.
"""

from collections.abc import Sequence

from halfmoon_protocol.errors import LayoutMismatch
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import KvstoreAddress, Role, StageAddress, WorkerInfo
from halfmoon_scheduling.cluster.decode_pool import DecodePool
from halfmoon_scheduling.cluster.prefill_pool import PrefillPool
from halfmoon_scheduling.placement.estimates import Placement, PlacementRequest, PrefillCandidate
from halfmoon_scheduling.placement.home_kvstore import choose_home
from halfmoon_scheduling.placement.local_prefill import LocalPrefillEstimate
from halfmoon_scheduling.placement.prefill_groups import PrefillGroup, complete_groups
from halfmoon_scheduling.placement.worker_limits import RoleCapacity
from halfmoon_scheduling.prediction.cost_model import CostModel
from halfmoon_scheduling.prediction.decode_forecast import DecodeStay


class UnfitWorker(Exception):
    """A worker that can't work with the others; the text names what differs, both ways."""


class Cluster:
    """Live workers, their loads, and our claims on them."""

    def __init__(
        self,
        costs: CostModel,
        *,
        block_size: int | None = None,
        decode_time_s: float | None = None,
    ) -> None:
        """No workers yet.

        Args:
            costs: learns from loads.
            block_size: tokens per block that every layout must have; None: any.
            decode_time_s: see `DecodePool`.
        """
        self._costs = costs
        self._block_size = block_size
        #: What all KV bytes mean: set by the first prefill or decode worker, and forgotten with
        #: the last one. A kvstore follows: one that holds blocks of something else is not used.
        self.layout: KvLayout | None = None
        self.model = ""
        self._infos: dict[WorkerId, WorkerInfo] = {}
        #: Exactly the prefill workers of `_infos`; likewise `decodes`.
        self.prefills = PrefillPool(costs)
        self.decodes = DecodePool(costs, decode_time_s=decode_time_s)
        #: Home of each prefill worker, as far as asked for since kvstores last changed.
        self._homes: dict[WorkerId, WorkerId | None] = {}
        #: Those that take new work, by role, as far as asked for since workers last changed.
        self._crews: dict[Role, RoleCapacity] = {}
        #: Complete ones among them; None until asked for, likewise.
        self._groups: tuple[PrefillGroup, ...] | None = None
        #: Tokens of the longest rest that any decode worker prefills by itself.
        self._local_tokens: int | None = None

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
        self._forget_crews()
        if info.layout is not None and info.role != "kvstore":
            self._means(info.layout, self.model or info.model)
        if info.role == "prefill":
            self.prefills.join(info)
            self._homes.pop(info.worker_id, None)
        elif info.role == "decode":
            self.decodes.join(info)
        else:
            self._homes.clear()

    def leave(self, worker_id: WorkerId) -> None:
        """A worker is gone, and with it all claims on it."""
        info = self._infos.pop(worker_id)
        self._forget_crews()
        if info.role == "prefill":
            self.prefills.leave(worker_id)
            self._homes.pop(worker_id, None)
        elif info.role == "decode":
            self.decodes.leave(worker_id)
        else:
            self._homes.clear()
        self._costs.forget(worker_id)
        if all(other.role == "kvstore" for other in self._infos.values()):
            self._means(None, "")

    def home_of(self, prefill: WorkerId) -> WorkerId | None:
        """The kvstore that a live prefill worker keeps its blocks in."""
        try:
            return self._homes[prefill]
        except KeyError:
            info = self._infos[prefill]
        kvstores = {other.worker_id: other.host for other in self.accepting("kvstore")}
        home = choose_home(prefill, info.host, info.home_kvstore, kvstores)
        self._homes[prefill] = home
        return home

    def address(self, kvstore: WorkerId) -> KvstoreAddress:
        """A live kvstore as a prefill worker reaches it."""
        info = self._infos[kvstore]
        return KvstoreAddress(kvstore, info.generation, info.commands)

    # -- who can take work -------------------------------------------------------------------

    @property
    def unused_kvstores(self) -> dict[WorkerId, str]:
        """Live kvstores that hold blocks of another layout, each with what differs."""
        unused = {}
        for info in self._infos.values():
            if self.layout is not None and info.role == "kvstore" and not self._is_of_use(info):
                assert info.layout is not None
                try:
                    self.layout.require_same(info.layout, "the cluster", info.worker_id)
                except LayoutMismatch as error:
                    unused[info.worker_id] = str(error)
        return unused

    def role_capacity(self, role: Role) -> RoleCapacity:
        """Live workers of a role that take new work, in the order of their ids."""
        if (found := self._crews.get(role)) is None:
            infos = (i for i in self._infos.values() if i.role == role and self._takes_work(i))
            found = RoleCapacity.of(sorted(infos, key=lambda info: info.worker_id))
            self._crews[role] = found
        return found

    def accepting(self, role: Role) -> tuple[WorkerInfo, ...]:
        """The members of that crew."""
        return self.role_capacity(role).workers

    @property
    def groups(self) -> tuple[PrefillGroup, ...]:
        """Complete groups of prefill workers that take new work."""
        if self._groups is None:
            self._groups = complete_groups(self.accepting("prefill"))
        return self._groups

    @property
    def local_tokens(self) -> int:
        """Tokens of the longest rest that any decode worker prefills by itself; 0: none does."""
        if self._local_tokens is None:
            decodes = self.accepting("decode")
            self._local_tokens = max((i.local_prefill_tokens for i in decodes), default=0)
        return self._local_tokens

    def stage_address(self, prefill: WorkerId) -> StageAddress:
        """A live prefill worker as the others of its group reach it."""
        info = self._infos[prefill]
        return StageAddress(prefill, info.generation, info.commands)

    def prefill_candidates(
        self, workers: Sequence[WorkerInfo], now: float
    ) -> list[PrefillCandidate]:
        """These prefill workers as placement sees them."""
        if len(self._homes) < len(self.prefills):
            for info in workers:
                self.home_of(info.worker_id)
        return self.prefills.candidates(workers, self._homes, now)

    def promise(
        self,
        placement: Placement,
        decode: WorkerId,
        job: PlacementRequest,
        stay: DecodeStay,
        now: float,
        *,
        tbt_slo_s: float | None,
    ) -> None:
        """A request is to run where it was placed: both sides keep their part of it in mind."""
        chosen, local_s = placement.chosen, 0.0
        if isinstance(chosen, LocalPrefillEstimate):
            local_s = chosen.stalled_step_s
        else:
            self.prefills.plan(chosen, job, now)
        n_pages = -(-job.n_tokens // job.block_size)
        self.decodes.hold(
            decode,
            job.request_id,
            n_pages,
            stay,
            n_wanted=job.n_pages,
            tbt_slo_s=tbt_slo_s,
            local_s=local_s,
        )

    @property
    def transfers(self) -> dict[WorkerId, int]:
        """Reads planned or under way at each kvstore; no value is 0."""
        return self.prefills.transfers

    def check(self) -> None:
        """Audit: each worker in the books of its role, one layout, homes that are here."""
        for info in self._infos.values():
            assert (info.worker_id in self.prefills) == (info.role == "prefill")
            assert (info.worker_id in self.decodes) == (info.role == "decode")
            assert info.role == "kvstore" or info.layout == self.layout
        if self.layout is not None:
            assert any(info.role != "kvstore" for info in self._infos.values())
        self.prefills.check()
        self.decodes.check()
        for worker_id, home in self._homes.items():
            assert worker_id in self.prefills
            assert home is None or self._infos[home].role == "kvstore"
        for role, found in self._crews.items():
            assert {i.worker_id for i in found.workers} == {
                i.worker_id for i in self._infos.values() if i.role == role and self._takes_work(i)
            }
        assert self._groups in (None, complete_groups(self.accepting("prefill")))

    def _means(self, layout: KvLayout | None, model: str) -> None:
        """What KV bytes mean here from now on, and so which kvstores are of use."""
        if layout != self.layout:
            self._homes.clear()
            self._forget_crews()
        self.layout, self.model = layout, model

    def _takes_work(self, info: WorkerInfo) -> bool:
        return not info.draining and self._is_of_use(info)

    def _is_of_use(self, info: WorkerInfo) -> bool:
        """Whether its blocks are the cluster's KV; one that holds nothing yet will hold that."""
        return self.layout is None or info.layout in (None, self.layout)

    def _forget_crews(self) -> None:
        self._crews.clear()
        self._groups = None
        self._local_tokens = None

    def _require_fit(self, info: WorkerInfo) -> None:
        if info.role == "kvstore":
            return  # it has its own life: see `unused_kvstores`
        if info.layout is None:
            raise UnfitWorker(f"{info.role} worker {info.worker_id} states no KV layout")
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
