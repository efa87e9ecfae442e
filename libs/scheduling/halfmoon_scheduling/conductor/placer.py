"""Place requests on live workers, and correct predictions by the times that prefills took.

The conductor's state machine asks where a request would run; the placer reserves nothing at any
worker. The choice itself is `placement_policy.place`, a plain function.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from halfmoon_protocol.ids import RequestId, WorkerId, original_request_id
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import PrefillDone, WorkerInfo
from halfmoon_scheduling.admission.slos import Slos
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.conductor.ordered_placement import RowSearch, keep_best_rows
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.directory.prefix_index import PrefixIndex
from halfmoon_scheduling.events import Request
from halfmoon_scheduling.placement.cached_prefixes import CachedPrefixes
from halfmoon_scheduling.placement.estimates import Estimate, Placement, PlacementRequest
from halfmoon_scheduling.placement.local_prefill import LocalPrefillEstimate, prefer_local_prefill
from halfmoon_scheduling.placement.modes import open_placement_mode
from halfmoon_scheduling.placement.page_holders import PageHolders
from halfmoon_scheduling.placement.placement_mode import ModeSettings, PrefixSource, TtftSlo
from halfmoon_scheduling.placement.placement_policy import NO_SERVERS, place
from halfmoon_scheduling.placement.prefill_groups import GroupEstimate, prefer_group
from halfmoon_scheduling.placement.server_pairs import paired_workers
from halfmoon_scheduling.placement.worker_limits import NoWorkerFits, able_workers, fits_prefill
from halfmoon_scheduling.prediction.cost_model import CostModel

#: Requests whose failed workers are remembered at the most.
MAX_AVOIDED = 1024
#: Further kvstores named to a reader, and holders that are compared to choose them.
MAX_REPLICAS = 3
MAX_LOOKED_AT = 16

#: A placement, and what returns the row of any prefill worker that it was compared with.
_Found = tuple[Placement, Callable[[WorkerId], Estimate | None]]


class _SearchScope(NamedTuple):
    """Workers that take work and are left out of a search; few."""

    prefills: Collection[WorkerId]
    decodes: Collection[WorkerId]


_NONE_LEFT_OUT = _SearchScope((), ())


class Placer:
    """Gather the inputs of placement, and remember at which workers a request failed."""

    def __init__(
        self, config: SchedulingConfig, cluster: Cluster, index: PrefixIndex, costs: CostModel
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._index = index
        self._costs = costs
        self._slos = Slos(config, cluster)
        self._mode = open_placement_mode(
            config.placement, ModeSettings(config.kvcache_balancing_threshold, config.seed)
        )
        #: Whether the orders of the pools are used where they can be; tests compare both.
        self.searches = True
        self._page_holders = PageHolders()
        #: By the client's request, since its tries have different ids.
        self._avoided: OrderedDict[str, set[WorkerId]] = OrderedDict()

    def place(
        self,
        request: Request,
        not_to_ask: Collection[WorkerId],
        now: float,
        *,
        apart_from: Collection[WorkerId] = (),
    ) -> tuple[Placement, PlacementRequest]:
        """Return the best workers now, without a decode worker when none has room.

        Args:
            request: what to place.
            not_to_ask: decode workers that refused, or did not answer.
            now: seconds.
            apart_from: workers of either role that it must not go to; not all that are able.

        Raises:
            NoWorkerFits: none of the workers here can ever take it.
        """
        layout = self._layout()
        scope = self._search_scope(request, apart_from)
        n_tokens = len(request.token_ids)
        n_pages = layout.blocks_for(n_tokens)
        may_grow = layout.blocks_for(n_tokens + request.stopping.max_new_tokens - 1) > n_pages
        job = PlacementRequest(
            request.request_id,
            n_tokens,
            n_pages + may_grow,
            layout.block_size,
            layout.block_bytes,
            request.block_hashes,
            request.priority,
            self._pages_at(request),
        )

        def ttft_slo_s(prefill: WorkerId) -> float | None:
            return self._slos.ttft_s(request, prefill)

        avoided = self._avoided.get(original_request_id(request.request_id), ())
        prefixes: Mapping[WorkerId, int] = self._index.longest_prefix(request.block_hashes)
        if unread := {*avoided, *self._cluster.foreign_kvstores}:
            prefixes = {kvstore: n for kvstore, n in prefixes.items() if kvstore not in unread}
        servers = self._cluster.servers
        found = None
        decodes: Sequence[WorkerInfo]
        if scope is not None:
            decodes = self._cluster.accepting("decode")
            if scope.decodes:
                not_to_ask = {*not_to_ask, *scope.decodes}
            found = self._search(job, scope.prefills, prefixes, not_to_ask, ttft_slo_s, now)
        if found is None:
            prefills, decodes = self._able(request, apart_from)
            found = self._compare_all(job, prefills, decodes, prefixes, not_to_ask, ttft_slo_s, now)
        placement, row_of = found
        if self._mode.compares_ttft and placement.chosen.worker_id not in servers:
            if servers:
                prefixes = {k: n for k, n in prefixes.items() if k not in servers}
            if groups := self._cluster.groups:
                source = placement.chosen.source
                placement = prefer_group(
                    placement,
                    job,
                    groups,
                    self._costs,
                    single=self._row_of_member(
                        request, job, prefixes, row_of, {*avoided, *apart_from}, now
                    ),
                    n_active=0 if source is None else self._cluster.transfers.get(source, 0),
                    least_gain=self._config.group_least_gain,
                )
            placement = self._at_decode(placement, job, request, decodes, prefixes, not_to_ask)
        return keep_best_rows(placement, self._mode), job

    def _search_scope(
        self, request: Request, apart_from: Collection[WorkerId]
    ) -> _SearchScope | None:
        """Return which workers the orders of the pools are searched without.

        None: all workers must be compared. See `_able` for the workers that are left out.
        """
        cluster = self._cluster
        if not self.searches or self._mode.ranks_by is None or cluster.servers:
            return None
        prefills, decodes = cluster.role_capacity("prefill"), cluster.role_capacity("decode")
        able = able_workers(request, prefills, decodes, self._layout().block_size)
        if able[0] is not prefills.workers or able[1] is not decodes.workers:
            return None
        avoided = self._avoided.get(original_request_id(request.request_id), ())
        if not avoided and not apart_from:
            return _NONE_LEFT_OUT
        left_out = []
        for capacity in (prefills, decodes):
            role = capacity.workers[0].role
            apart = {w for w in apart_from if cluster.accepts(role, w)}
            others = apart | {w for w in avoided if cluster.accepts(role, w)}
            if len(apart) == len(capacity.workers):
                return None
            left_out.append(others if len(others) < len(capacity.workers) else apart)
        return _SearchScope(*left_out)

    def _search(
        self,
        job: PlacementRequest,
        left_out: Collection[WorkerId],
        prefixes: Mapping[WorkerId, int],
        not_to_ask: Collection[WorkerId],
        ttft_slo_s: TtftSlo,
        now: float,
    ) -> _Found | None:
        """Find the best workers by the orders of the pools; None: all must be compared."""
        cluster = self._cluster
        if (order := cluster.prefills.order_for(job.priority, now)) is None:
            return None
        cached = CachedPrefixes.of(self._mode, job, prefixes, cluster.transfers, NO_SERVERS)
        search = RowSearch(self._mode, job, cached, cluster, self._costs, now, left_out)
        decode, tbt_s = cluster.decodes.choose(job.n_pages, job.n_tokens, not_to_ask, job.pages_at)
        placement = search.place(cluster.accepting("prefill"), order, ttft_slo_s, decode, tbt_s)
        if (
            self._config.replication_bytes_per_s > 0
            and cached.if_none_own is PrefixSource.FASTER
            and placement.known_blocks < cached.n_longest
        ):
            return None  # whether any worker would use the longest prefix takes all rows
        return placement, search.row_of

    def _compare_all(
        self,
        job: PlacementRequest,
        prefills: Sequence[WorkerInfo],
        decodes: Sequence[WorkerInfo],
        prefixes: Mapping[WorkerId, int],
        not_to_ask: Collection[WorkerId],
        ttft_slo_s: TtftSlo,
        now: float,
    ) -> _Found:
        """Compare the rows of all workers."""
        cluster = self._cluster
        placement = place(
            self._mode,
            job,
            cluster.prefill_candidates(prefills, now, job.priority),
            cluster.decodes.candidates(_without(decodes, not_to_ask), job.n_pages),
            prefixes,
            cluster.transfers,
            self._costs,
            ttft_slo_s,
            cluster.servers,
        )
        return placement, {row.worker_id: row for row in placement.estimates}.get

    def _row_of_member(
        self,
        request: Request,
        job: PlacementRequest,
        prefixes: Mapping[WorkerId, int],
        row_of: Callable[[WorkerId], Estimate | None],
        barred: Collection[WorkerId],
        now: float,
    ) -> Callable[[WorkerId], Estimate | None]:
        """Return a function that returns the row of a group's member; None: it can't take part.

        Members with one stage's layers alone are not among the workers that were compared.
        """

        def member(worker_id: WorkerId) -> Estimate | None:
            info = self._cluster.get(worker_id)
            if info is None or not info.stage_layers_only:
                return row_of(worker_id)
            if worker_id in barred or not fits_prefill(request, info, job.block_size):
                return None
            transfers = self._cluster.transfers
            cached = CachedPrefixes.of(self._mode, job, prefixes, transfers, NO_SERVERS)
            search = RowSearch(self._mode, job, cached, self._cluster, self._costs, now)
            return search.row_of(worker_id)

        return member

    def takers(
        self,
        request: Request,
        not_to_ask: Collection[WorkerId],
        *,
        apart_from: Collection[WorkerId] = (),
    ) -> frozenset[WorkerId]:
        """Return the decode workers that `place` would choose among if they all had room.

        Raises:
            NoWorkerFits: see `place`.
        """
        _, decodes = self._able(request, apart_from)
        return frozenset(info.worker_id for info in decodes).difference(not_to_ask)

    def can_keep_apart(self, request: Request, others: Collection[WorkerId]) -> bool:
        """Return whether workers of both roles that are not `others` could take a request.

        Raises:
            NoWorkerFits: see `place`.
        """
        return all(self._able(request, others))

    def _able(
        self, request: Request, apart_from: Collection[WorkerId]
    ) -> tuple[Sequence[WorkerInfo], Sequence[WorkerInfo]]:
        """Return the prefill and decode workers that could take a request.

        Workers to keep apart from are left out. So are those that the request avoids, unless none
        would be left.
        """
        prefills, decodes = able_workers(
            request,
            self._cluster.role_capacity("prefill"),
            self._cluster.role_capacity("decode"),
            self._layout().block_size,
        )
        if apart_from:
            prefills = [info for info in prefills if info.worker_id not in apart_from]
            decodes = [info for info in decodes if info.worker_id not in apart_from]
        avoided = self._avoided.get(original_request_id(request.request_id))
        if not self._cluster.servers:
            if avoided:
                return _others(prefills, avoided), _others(decodes, avoided)
            return prefills, decodes
        pairs = paired_workers(prefills, decodes)
        if not all(pairs) and not apart_from:
            raise NoWorkerFits(
                f"{len(request.token_ids)} tokens and up to {request.stopping.max_new_tokens} new"
                " ones fit no server"
            )
        if avoided:
            others = paired_workers(_others(prefills, avoided), _others(decodes, avoided))
            return others if all(others) else pairs
        return pairs

    def _layout(self) -> KvLayout:
        layout = self._cluster.layout
        assert layout is not None, "prefill and decode workers join with a layout"
        return layout

    def _at_decode(
        self,
        placement: Placement,
        job: PlacementRequest,
        request: Request,
        decodes: Sequence[WorkerInfo],
        prefixes: Mapping[WorkerId, int],
        not_to_ask: Collection[WorkerId],
    ) -> Placement:
        """Choose a decode worker that prefills by itself, if one can and that is faster."""
        local_tokens = self._cluster.local_tokens
        if not local_tokens or placement.decode is None:
            return placement
        longest = min(max(prefixes.values(), default=0), job.max_cached_blocks)
        n_computed = job.n_tokens - longest * job.block_size
        if n_computed > local_tokens:
            return placement
        candidates = self._cluster.decodes.candidates(_without(decodes, not_to_ask), job.n_pages)
        return prefer_local_prefill(
            placement,
            job,
            self._cluster.decodes.local_prefill_candidates(candidates),
            prefixes,
            self._cluster.transfers,
            self._costs,
            lambda decode: self._slos.tbt_s(request, decode),
        )

    def sources(self, placement: Placement, request: Request) -> list[WorkerId]:
        """Return the kvstores to read the cached prefix from, nearest first; there may be none.

        Each holds the whole prefix that the placement assumes: a kvstore that holds its last block
        holds the blocks before it. The placement's own choice is the first among equally near ones.
        """
        chosen = placement.chosen
        reader = self._cluster.get(chosen.worker_id)
        servers = self._cluster.servers
        if chosen.source is None or chosen.source in servers or reader is None:
            return []
        avoided = self._avoided.get(original_request_id(request.request_id), ())
        held = self._index.holders(request.block_hashes[chosen.n_blocks - 1])
        transfers = self._cluster.transfers
        ranked: list[tuple[bool, bool, int, WorkerId]] = []
        for kvstore in (chosen.source, *islice(held, MAX_LOOKED_AT)):
            info = self._cluster.get(kvstore)
            is_second = kvstore == chosen.source and bool(ranked)
            if info is None or is_second or kvstore in avoided or kvstore in servers:
                continue
            if kvstore in self._cluster.foreign_kvstores:
                continue
            n_active = transfers.get(kvstore, 0)
            ranked.append((info.host != reader.host, kvstore != chosen.source, n_active, kvstore))
        return [kvstore for *_, kvstore in sorted(ranked)[: 1 + MAX_REPLICAS]]

    def store_for(self, request_id: RequestId, chosen: Estimate) -> WorkerId | None:
        """Return the kvstore that is to keep this request's blocks.

        A decode worker uses the kvstore that it reads from, or else one on its host. A server keeps
        its blocks by itself.
        """
        if isinstance(chosen, LocalPrefillEstimate):
            home = chosen.home
            if chosen.source is None and chosen.worker_id in self._cluster:
                home = self._cluster.kvstore_beside(chosen.worker_id) or home
            home = home if home is not None and home in self._cluster else None
        else:
            home = self._cluster.home_of(chosen.worker_id)
        if home in self._cluster.servers:
            return None  # the server keeps them by itself
        return None if home in self._avoided.get(original_request_id(request_id), ()) else home

    def _pages_at(self, request: Request) -> WorkerId | None:
        """Return the decode worker that may have pages of a prompt's prefix."""
        if (found := self._page_holders.find(request.block_hashes)) is None:
            return None
        worker_id, generation = found
        info = self._cluster.get(worker_id)
        return None if info is None or info.generation != generation else worker_id

    def on_landed(self, request: Request, decode: WorkerId) -> None:
        """Remember where a prompt is decoded, if that worker keeps its pages."""
        info = self._cluster.get(decode)
        if info is not None and info.keeps_pages:
            self._page_holders.put(request.block_hashes, decode, info.generation)

    def learn(self, placement: Placement, request: Request, done: PrefillDone, now: float) -> None:
        """Correct the predictions by a prefill's times; it is still in its worker's queue.

        The order of the prefill workers takes up the correction when the request leaves the queue.
        """
        chosen = placement.chosen
        if not isinstance(chosen, LocalPrefillEstimate):
            self._mode.on_prefill_done(request.block_hashes, chosen.worker_id)
        if isinstance(chosen, GroupEstimate | LocalPrefillEstimate):
            return  # times of stages, or a prompt's share of a step, are not reported
        info = self._cluster.get(chosen.worker_id)
        if info is None or info.prefill_cost is None:
            pass
        elif done.fetch_s >= done.compute_s / 2:
            # Compute time includes waits for fetched layers, which are no computing.
            self._costs.skip_prefill(chosen.worker_id)
        else:
            # Compute time and busy time are both at least the time that this request alone takes:
            # passes are shared, and bytes are under way while the next request computes.
            busy_s = self._cluster.prefills.busy_s(chosen.worker_id, request.request_id, now)
            self._costs.observe_prefill(
                chosen.worker_id,
                info.prefill_cost,
                len(request.token_ids),
                done.n_cached,
                min(done.compute_s, busy_s),
            )
        if done.fetched_from not in (None, chosen.source):
            return  # another path, while something was wrong
        if chosen.source is not None and chosen.transfer_blocks and chosen.source in self._cluster:
            others = max(0, self._cluster.transfers.get(chosen.source, 0) - 1)
            self._costs.observe_transfer(
                chosen.source, chosen.worker_id, done.fetched_bytes, done.fetch_s, others
            )

    def avoid(self, request_id: RequestId, worker_id: WorkerId) -> None:
        """Have later tries of this client's request use another worker, if there is one.

        A kvstore is avoided even if there is no other.
        """
        self._avoided.setdefault(original_request_id(request_id), set()).add(worker_id)
        if len(self._avoided) > MAX_AVOIDED:
            self._avoided.popitem(last=False)

    def forget(self, request_id: RequestId) -> None:
        """Drop what is remembered of a client's request: all its tries are over."""
        self._avoided.pop(original_request_id(request_id), None)


def _without(workers: Sequence[WorkerInfo], left_out: Collection[WorkerId]) -> Sequence[WorkerInfo]:
    if not left_out:
        return workers
    return [info for info in workers if info.worker_id not in left_out]


def _others(workers: Sequence[WorkerInfo], avoided: Collection[WorkerId]) -> Sequence[WorkerInfo]:
    """Return the workers that need not be avoided, or all if none is left."""
    return [info for info in workers if info.worker_id not in avoided] or workers
