"""End requests: done, given up, to be tried again, or refused.

A request ends once: by one `Reject`, `Fail` or `Resubmit` from here, by a final `Deliver`, or
without a command when its client or decode is done with it. A retry (attempt 2 and on) is never
rejected: its stream has begun, so it fails instead.
"""

from collections import Counter

from halfmoon_protocol.messages import Cancel, WorkerInfo
from halfmoon_scheduling.admission.loss_history import LossHistory
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.cluster.send_if_live import send_if_live
from halfmoon_scheduling.commands import AnyCommand, Fail, Reject, Resubmit
from halfmoon_scheduling.conductor.placer import Placer
from halfmoon_scheduling.conductor.request_table import RequestTable
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import Casualty
from halfmoon_scheduling.requests.orphaned_landings import OrphanedLanding
from halfmoon_scheduling.requests.request_state import PREFILLED, UNPLACED, Phase, RequestState

#: Seconds after which a refused client may try again when nothing better is known.
RETRY_S = 1.0


class RequestEndings:
    """End the requests of a table."""

    def __init__(
        self,
        config: SchedulingConfig,
        cluster: Cluster,
        table: RequestTable,
        placer: Placer,
        losses: LossHistory,
    ) -> None:
        self._losses = losses
        self._config = config
        self._cluster = cluster
        self._table = table
        self._placer = placer
        #: Requests that were refused, by the limit missed or the resource lacking.
        self.refusals: Counter[str] = Counter()

    # -- served, or given up -----------------------------------------------------------------

    def end(self, state: RequestState, now: float) -> None:
        """End a request whose client gets no more of it; its workers know."""
        self._table.remove(state, now)
        self._placer.forget(state.request_id)

    def give_up(
        self,
        state: RequestState,
        now: float,
        *,
        because: str = "",
        counts: bool = True,
        casualty: Casualty | None = None,
    ) -> list[AnyCommand]:
        """Cancel what a request holds at live workers, and end it; retry it if `because`.

        Args:
            state: the request.
            now: seconds.
            because: the reason to try it again; empty: it is not tried again.
            counts: whether it counts among the tries that brought no token.
            casualty: the worker that was lost, or hung, while it computed this try, if so.
        """
        request_id, prefill, decode = state.request_id, state.prefill, state.decode
        # A decode worker that prefills by itself frees everything on one `Cancel`.
        prefilling = state.phase is Phase.PREFILLING and bool(state.writers)
        commands: list[AnyCommand] = []
        keep_landing = False
        if prefilling and prefill is not None and prefill in self._cluster:
            commands += send_if_live(self._cluster, prefill, Cancel(request_id=request_id))
            keep_landing = self._orphan_landing(state, now)
        elif state.phase not in UNPLACED:
            assert decode is not None
            cancel = Cancel(request_id=request_id, landing_in_doubt=prefilling)
            commands += send_if_live(self._cluster, decode, cancel)
        if because:
            return commands + self.retry(
                state,
                because,
                now,
                keep_landing=keep_landing,
                counts=counts,
                casualty=casualty,
            )
        self._table.remove(state, now, keep_landing=keep_landing)
        self._placer.forget(request_id)
        return commands

    def _orphan_landing(self, state: RequestState, now: float) -> bool:
        """Keep a landing until its prefill has stopped; return False when decode is gone."""
        assert state.prefill is not None and state.decode is not None
        if state.decode not in self._cluster:
            return False
        deadline_s = now + self._config.reserve_timeout_s
        lost = any(writer not in self._cluster for writer in state.writers)
        landing = OrphanedLanding(
            state.prefill, state.writers, state.decode, deadline_s, in_doubt=lost
        )
        self._table.orphaned.add(state.request_id, landing)
        return True

    def give_up_at(self, lost: WorkerInfo, reason: str, now: float) -> list[AnyCommand]:
        """Retry all requests at a worker that has left the cluster.

        A draining worker was told to leave, so its loss counts against no request.
        """
        worker_id, generation = lost.worker_id, lost.generation
        counts = lost.draining or self._losses.note(worker_id, generation, now)
        commands = self._table.orphaned.on_worker_lost(worker_id)
        for state in self._table.all():
            on_prefill = worker_id in state.writers and state.phase not in PREFILLED
            if on_prefill or state.decode == worker_id:
                casualty = None
                if state.is_computed_at(worker_id) and not lost.draining:
                    casualty = Casualty(worker_id, generation, state.is_alone)
                because = f"{worker_id} is lost: {reason}"
                commands += self.give_up(
                    state, now, because=because, counts=counts, casualty=casualty
                )
        return commands

    def retry(
        self,
        state: RequestState,
        reason: str,
        now: float,
        *,
        retryable: bool = True,
        invalid: bool = False,
        code: str = "",
        keep_landing: bool = False,
        counts: bool = True,
        casualty: Casualty | None = None,
    ) -> list[AnyCommand]:
        """End a try, whose workers know; start another one if that may help and is allowed."""
        if casualty is not None:
            self._placer.avoid(state.request_id, casualty.worker_id)
        self._table.remove(state, now, keep_landing=keep_landing)
        if not counts:
            return [Resubmit(state.request_id, reason, casualty, counts=False)]
        # A try that came to decoding has delivered a token: it is progress, however often
        # the request is preempted.
        decoding = state.phase is Phase.DECODING
        fruitless = 0 if decoding else state.request.fruitless + 1
        if retryable and not invalid and fruitless < self._config.max_attempts:
            return [Resubmit(state.request_id, reason, casualty)]
        self._placer.forget(state.request_id)
        if retryable and not invalid:
            reason = f"{reason} ({fruitless} tries in a row brought no token)"
        return [Fail(state.request_id, reason, invalid, code)]

    # -- refused: the request holds nothing --------------------------------------------------

    def refuse_overloaded(
        self, state: RequestState, lacking: str, reason: str, retry_after_s: float = RETRY_S
    ) -> list[AnyCommand]:
        """Refuse a request for lack of room; `lacking` names the limit or resource."""
        self.refusals[lacking] += 1
        reject = Reject(state.request_id, "overloaded", reason, retry_after_s)
        return self._refuse(state, reject)

    def refuse_unavailable(self, state: RequestState, reason: str) -> list[AnyCommand]:
        """Refuse a request that no live worker takes now."""
        self.refusals["unavailable"] += 1
        return self._refuse(state, Reject(state.request_id, "unavailable", reason, RETRY_S))

    def refuse_too_long(self, state: RequestState, reason: str) -> list[AnyCommand]:
        """Refuse a request that no worker here can ever take."""
        self.refusals["too_long"] += 1
        return self._refuse(state, Reject(state.request_id, "too_long", reason))

    def refuse_unsupported(self, state: RequestState, reason: str) -> list[AnyCommand]:
        """Refuse a request that asks for what no worker here can do."""
        self.refusals["unsupported"] += 1
        return self._refuse(state, Reject(state.request_id, "unsupported", reason))

    def _refuse(self, state: RequestState, reject: Reject) -> list[AnyCommand]:
        self._table.discard(state)
        self._placer.forget(state.request_id)
        return [reject]

    def refuse_harmful(self, state: RequestState) -> list[AnyCommand]:
        """Fail a request under which a worker was lost that computed nothing else."""
        casualties = state.request.casualties
        starts = ", ".join(f"{c.worker_id} (start {c.generation})" for c in casualties)
        self.refusals["harmful"] += 1
        self._table.discard(state)
        self._placer.forget(state.request_id)
        reason = (
            f"{len(casualties)} workers were lost or hung while they computed this request: "
            f"{starts}; the last one computed nothing else, and it is not tried on another"
        )
        return [Fail(state.request_id, reason, invalid=True, casualties=casualties)]

    def refuse_landed(
        self, state: RequestState, reason: str, retry_after_s: float, now: float
    ) -> list[AnyCommand]:
        """Refuse a request after its prefill, which was wasted."""
        decode, request_id = state.decode, state.request_id
        assert decode is not None
        self.refusals["tbt_late"] += 1
        self.end(state, now)
        reject = Reject(request_id, "overloaded", reason, retry_after_s)
        return [reject, *send_if_live(self._cluster, decode, Cancel(request_id=request_id))]
