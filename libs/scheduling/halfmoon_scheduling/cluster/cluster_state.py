"""Track the live workers: their records, their common KV layout, and their home kvstores.

This is bookkeeping without choices. `prefill_pool` tracks the queues of prefill workers, and
`decode_pool` the reservations at decode workers.
"""

from collections.abc import Collection, Mapping, Sequence

from halfmoon_protocol.blocks import check_block_size
from halfmoon_protocol.errors import LayoutMismatch, ProtocolError
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import KvstoreAddress, Role, StageAddress, WorkerInfo
from halfmoon_scheduling.cluster.decode_pool import DecodePool
from halfmoon_scheduling.cluster.prefill_pool import PrefillPool
from halfmoon_scheduling.placement.estimates import Placement, PlacementRequest, PrefillCandidate
from halfmoon_scheduling.placement.home_kvstore import choose_home
from halfmoon_scheduling.placement.local_prefill import LocalPrefillEstimate
from halfmoon_scheduling.placement.prefill_groups import PrefillGroup, complete_groups, group_faults
from halfmoon_scheduling.placement.worker_limits import RoleCapacity
from halfmoon_scheduling.prediction.cost_model import CostModel
from halfmoon_scheduling.prediction.decode_forecast import DecodeStay

#: Roles of which a server has both.
_PARTNER: Mapping[Role, Role] = {"prefill": "decode", "decode": "prefill"}


class UnfitWorker(Exception):
    """A worker that can't work with the others; the message names both sides of the difference."""


class Cluster:
    """Track live workers, their loads, and our claims on them."""

    def __init__(
        self,
        costs: CostModel,
        *,
        block_size: int | None = None,
        decode_time_s: float | None = None,
        counts_running: bool = False,
    ) -> None:
        """Start without workers.

        Args:
            costs: predictions, which learn from loads.
            block_size: tokens per block that every layout must have; None: any.
            decode_time_s: see `DecodePool`.
            counts_running: likewise.
        """
        self._costs = costs
        self._block_size = block_size
        #: The common KV layout: set by the first prefill or decode worker. It stays when the last
        #: one has left, which may come back, until one of another layout joins. A kvstore with
        #: blocks of another layout is not used.
        self.layout: KvLayout | None = None
        self.model = ""
        self._infos: dict[WorkerId, WorkerInfo] = {}
        #: Exactly the prefill workers of `_infos`; likewise `decodes` for decode workers.
        self.prefills = PrefillPool(costs)
        self.decodes = DecodePool(costs, decode_time_s=decode_time_s, counts_running=counts_running)
        #: Home of each prefill worker, computed on demand since kvstores last changed.
        self._homes: dict[WorkerId, WorkerId | None] = {}
        #: The reverse: exactly those of `_homes` that have a home.
        self._guests: dict[WorkerId, set[WorkerId]] = {}
        #: Hosts of the kvstores that take new work: of each one, and of those of a server and host,
        #: and of a server. None until needed since kvstores last changed.
        self._kvstores: (
            dict[WorkerId | tuple[str, str | None] | None, dict[WorkerId, str]] | None
        ) = None
        #: Kvstores with blocks of another layout; None until needed, likewise.
        self._foreign: frozenset[WorkerId] | None = None
        #: Workers that take new work, by role, computed on demand since workers last changed.
        self._capacities: dict[Role, RoleCapacity] = {}
        #: Complete prefill groups among them; None until needed, likewise.
        self._groups: tuple[PrefillGroup, ...] | None = None
        #: Most tokens that any decode worker prefills by itself; None until needed, likewise.
        self._local_tokens: int | None = None
        #: See `servers`; None until needed, likewise.
        self._servers: Mapping[WorkerId, str] | None = None

    # -- live workers ------------------------------------------------------------------------

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._infos

    def get(self, worker_id: WorkerId) -> WorkerInfo | None:
        """Return a live worker's record; None if it is not live."""
        return self._infos.get(worker_id)

    def workers(self) -> list[WorkerInfo]:
        """Return all live workers' records, in the order in which they first joined."""
        return list(self._infos.values())

    def join(self, info: WorkerInfo) -> None:
        """Add a worker, or update its record; claims on it stay.

        Raises:
            UnfitWorker: it can't work with the others; nothing changed.
        """
        self._require_fit(info)
        model = self.model if self._has_model_workers() else ""
        self._infos[info.worker_id] = info
        self._forget_capacities()
        if info.layout is not None and info.role != "kvstore":
            self._set_layout(info.layout, model or info.model)
        if info.role == "prefill":
            self.prefills.join(info)
            self._forget_home(info.worker_id)
        elif info.role == "decode":
            self.decodes.join(info)
        else:
            self._forget_homes()

    def leave(self, worker_id: WorkerId) -> None:
        """Remove a worker that is gone, with all claims on it."""
        info = self._infos.pop(worker_id)
        self._forget_capacities()
        if info.role == "prefill":
            self.prefills.leave(worker_id)
            self._forget_home(worker_id)
        elif info.role == "decode":
            self.decodes.leave(worker_id)
        else:
            self._forget_homes()
        self._costs.forget(worker_id)

    def home_of(self, prefill: WorkerId) -> WorkerId | None:
        """Return the kvstore that keeps the blocks of a live prefill worker; None without one."""
        try:
            return self._homes[prefill]
        except KeyError:
            info = self._infos[prefill]
        kvstores = self._near_kvstores(info)
        home = choose_home(prefill, info.host, info.home_kvstore, kvstores)
        self._homes[prefill] = home
        if home is not None:
            self._guests.setdefault(home, set()).add(prefill)
        return home

    def kvstore_beside(self, worker_id: WorkerId) -> WorkerId | None:
        """Return the kvstore for a live worker's blocks on its own host; None: there is none."""
        info = self._infos[worker_id]
        on_host = {k: host for k, host in self._near_kvstores(info).items() if host == info.host}
        return choose_home(worker_id, info.host, None, on_host)

    def _near_kvstores(self, info: WorkerInfo) -> Mapping[WorkerId, str]:
        """Return the hosts of the kvstores among which the home of a prefill worker is chosen."""
        if self._kvstores is None:
            self._kvstores = {}
            for other in self.accepting("kvstore"):
                for key in ((other.server, other.host), (other.server, None), other.worker_id):
                    self._kvstores.setdefault(key, {})[other.worker_id] = other.host
        if info.home_kvstore in self._kvstores:
            return self._kvstores[info.home_kvstore]
        near = self._kvstores.get((info.server, info.host))
        return near or self._kvstores.get((info.server, None)) or {}

    def address(self, kvstore: WorkerId) -> KvstoreAddress:
        """Return the address at which prefill workers reach a live kvstore."""
        info = self._infos[kvstore]
        return KvstoreAddress(kvstore, info.generation, info.commands, info.key_id)

    # -- workers that take new requests ------------------------------------------------------

    @property
    def servers(self) -> Mapping[WorkerId, str]:
        """The server of each live worker that is a part of one."""
        if self._servers is None:
            infos = self._infos.values()
            self._servers = {info.worker_id: info.server for info in infos if info.server}
        return self._servers

    @property
    def foreign_kvstores(self) -> frozenset[WorkerId]:
        """Live kvstores that hold blocks of another layout: no prefix is read from them."""
        if self._foreign is None:
            infos = self._infos.values()
            self._foreign = frozenset(
                info.worker_id
                for info in infos
                if info.role == "kvstore" and not self._is_usable(info)
            )
        return self._foreign

    @property
    def unused_kvstores(self) -> dict[WorkerId, str]:
        """Live kvstores that hold blocks of another layout, each with the difference."""
        unused = {}
        for info in self._infos.values():
            if self.layout is not None and info.role == "kvstore" and not self._is_usable(info):
                assert info.layout is not None
                try:
                    self.layout.require_same(info.layout, "the cluster", info.worker_id)
                except LayoutMismatch as error:
                    unused[info.worker_id] = str(error)
        return unused

    def role_capacity(self, role: Role) -> RoleCapacity:
        """Return the live workers of a role that take new work, by their ids, and their limits.

        Those that take prompts of their group only are left out: see `groups`.
        """
        if (found := self._capacities.get(role)) is None:
            infos = self._find_accepting(role)
            found = RoleCapacity.of(sorted(infos, key=lambda info: info.worker_id))
            self._capacities[role] = found
        return found

    def accepting(self, role: Role) -> tuple[WorkerInfo, ...]:
        """Return the live workers of a role that take new work, by their ids."""
        return self.role_capacity(role).workers

    def accepts(self, role: Role, worker_id: WorkerId) -> bool:
        """Return whether `accepting` has a worker, in a cluster without servers."""
        info = self._infos.get(worker_id)
        if info is None or info.role != role or info.stage_layers_only:
            return False
        return self._takes_work(info)

    @property
    def groups(self) -> tuple[PrefillGroup, ...]:
        """Complete groups of prefill workers that take new work."""
        if self._groups is None:
            self._groups = complete_groups(self._members_of_groups())
        return self._groups

    @property
    def group_faults(self) -> dict[str, str]:
        """Groups that are not used, or have a stage twice, each with the reason."""
        return group_faults(self._members_of_groups())

    @property
    def local_tokens(self) -> int:
        """Most tokens that any decode worker prefills by itself; 0: none does."""
        if self._local_tokens is None:
            decodes = self.accepting("decode")
            self._local_tokens = max((i.local_prefill_tokens for i in decodes), default=0)
        return self._local_tokens

    @property
    def decodes_take_prompts(self) -> bool:
        """Return whether all decode workers prefill prompts of any length: they are hybrid."""
        decodes = self.accepting("decode")
        return bool(decodes) and all(
            info.local_prefill_tokens >= max(1, info.max_context) for info in decodes
        )

    def stage_address(self, prefill: WorkerId) -> StageAddress:
        """Return the address at which the other stages of its group reach a prefill worker."""
        info = self._infos[prefill]
        return StageAddress(prefill, info.generation, info.commands, info.key_id)

    def prefill_candidates(
        self, workers: Sequence[WorkerInfo], now: float, priority: int
    ) -> list[PrefillCandidate]:
        """Return the candidates of these prefill workers for a request of a priority."""
        self._find_homes()
        return self.prefills.candidates(workers, self._homes, now, priority)

    def prefill_candidate(self, worker_id: WorkerId, now: float, priority: int) -> PrefillCandidate:
        """Return the candidate of a live prefill worker for a request of a priority."""
        return self.prefills.candidate(worker_id, self.home_of(worker_id), now, priority)

    def guests(self, kvstore: WorkerId) -> Collection[WorkerId]:
        """Return the prefill workers whose home a kvstore is."""
        self._find_homes()
        return self._guests.get(kvstore, ())

    def _find_homes(self) -> None:
        if len(self._homes) < len(self.prefills):
            for worker_id in self.prefills:
                self.home_of(worker_id)

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
        """Claim the prefill queue and the decode pages for a request where it was placed."""
        chosen, local_s = placement.chosen, 0.0
        if isinstance(chosen, LocalPrefillEstimate):
            local_s = chosen.prefill_s
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
        """Check that each worker is in the pool of its role, and that layouts and homes agree."""
        for info in self._infos.values():
            assert (info.worker_id in self.prefills) == (info.role == "prefill")
            assert (info.worker_id in self.decodes) == (info.role == "decode")
            assert info.role == "kvstore" or info.layout == self.layout
        self.prefills.check()
        self.decodes.check()
        for worker_id, home in self._homes.items():
            assert worker_id in self.prefills
            assert home is None or self._infos[home].role == "kvstore"
        assert {(g, k) for k, guests in self._guests.items() for g in guests} == {
            (prefill, home) for prefill, home in self._homes.items() if home is not None
        }
        infos = self._infos.values()
        for role, found in self._capacities.items():
            assert {i.worker_id for i in found.workers} == {
                i.worker_id for i in self._find_accepting(role)
            }
        assert self._servers in (None, {i.worker_id: i.server for i in infos if i.server})
        assert self._groups in (None, complete_groups(self._members_of_groups()))

    def _set_layout(self, layout: KvLayout | None, model: str) -> None:
        """Set layout and model, which determine the usable kvstores."""
        if layout != self.layout:
            self._forget_homes()
            self._forget_capacities()
        self.layout, self.model = layout, model

    def _find_accepting(self, role: Role) -> list[WorkerInfo]:
        """Return the live workers of a role that take new work.

        A server takes none while a worker of either role is missing.
        """
        members = [
            info
            for info in self._infos.values()
            if info.role == role and self._takes_work(info) and not info.stage_layers_only
        ]
        if role == "kvstore" or not any(info.server for info in members):
            return members
        partners = {
            i.server
            for i in self._infos.values()
            if i.role == _PARTNER[role] and self._takes_work(i)
        }
        return [info for info in members if not info.server or info.server in partners]

    def _members_of_groups(self) -> list[WorkerInfo]:
        """Return the live prefill workers that take new work, those of one stage among them."""
        singles = self.accepting("prefill")
        infos = self._infos.values()
        parts = [i for i in infos if i.stage_layers_only and self._takes_work(i)]
        return [*singles, *(info for info in parts if info.role == "prefill")]

    def _has_model_workers(self) -> bool:
        return any(info.role != "kvstore" for info in self._infos.values())

    def _takes_work(self, info: WorkerInfo) -> bool:
        return not info.draining and self._is_usable(info)

    def _is_usable(self, info: WorkerInfo) -> bool:
        """Return whether a worker's blocks have the cluster's layout, or it has none yet."""
        return self.layout is None or info.layout in (None, self.layout)

    def _forget_home(self, prefill: WorkerId) -> None:
        if (home := self._homes.pop(prefill, None)) is not None:
            self._guests[home].discard(prefill)

    def _forget_homes(self) -> None:
        self._homes.clear()
        self._guests.clear()
        self._kvstores = None
        self._foreign = None

    def _forget_capacities(self) -> None:
        self._capacities.clear()
        self._groups = None
        self._local_tokens = None
        self._servers = None

    def _require_fit(self, info: WorkerInfo) -> None:
        if info.role == "kvstore":
            return  # it may hold blocks of another layout: see `unused_kvstores`
        if info.layout is None:
            raise UnfitWorker(f"{info.role} worker {info.worker_id} states no KV layout")
        try:
            check_block_size(info.layout.block_size)
        except ProtocolError as error:
            raise UnfitWorker(f"{error}, at {info.worker_id}") from None
        if self._block_size not in (None, info.layout.block_size):
            raise UnfitWorker(
                f"block_size is {self._block_size} by the conductor's settings, "
                f"{info.layout.block_size} at {info.worker_id}"
            )
        if self.layout is None or not self._has_model_workers():
            return
        try:
            self.layout.require_same(info.layout, "the cluster", info.worker_id)
        except LayoutMismatch as error:
            raise UnfitWorker(str(error)) from None
        if self.model and info.model and info.model != self.model:
            raise UnfitWorker(
                f"model is {self.model!r} at the cluster, {info.model!r} at {info.worker_id}"
            )
