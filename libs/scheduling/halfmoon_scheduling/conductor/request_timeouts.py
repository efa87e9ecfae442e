"""Act on deadlines: of waiting, of a reservation, of a prefill, of an orphaned landing."""

from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.commands import AnyCommand
from halfmoon_scheduling.conductor.decode_handover import DecodeHandover
from halfmoon_scheduling.conductor.request_admission import RequestAdmission
from halfmoon_scheduling.conductor.request_endings import RequestEndings
from halfmoon_scheduling.conductor.request_table import RequestTable
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import Casualty
from halfmoon_scheduling.requests.request_state import UNPLACED, Phase, RequestState


class RequestTimeouts:
    """Move on or end the requests whose deadline has passed."""

    def __init__(
        self,
        config: SchedulingConfig,
        cluster: Cluster,
        table: RequestTable,
        endings: RequestEndings,
        admission: RequestAdmission,
        handover: DecodeHandover,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._table = table
        self._endings = endings
        self._admission = admission
        self._handover = handover

    def on_tick(self, now: float) -> list[AnyCommand]:
        """Act on all deadlines that have passed, in the order of arrival."""
        commands: list[AnyCommand] = []
        for state in self._table.deadlines.pop_due(now):
            if self._table.get(state.request_id) is state:  # else an earlier one ended it
                commands += self._on_deadline(state, now)
        return commands + self._table.orphaned.on_tick(now)

    def _on_deadline(self, state: RequestState, now: float) -> list[AnyCommand]:
        if state.phase in UNPLACED:
            return self._admission.on_wait_timeout(state, now)
        if state.phase is Phase.RESERVING:
            return self._admission.on_reserve_timeout(state, now)
        if state.phase is Phase.LANDED:
            return self._handover.on_landed_timeout(state, now)
        return self._on_prefill_timeout(state, now)

    def _on_prefill_timeout(self, state: RequestState, now: float) -> list[AnyCommand]:
        timeout_s = self._config.request_timeout_s
        because = f"{state.prefill} did not finish in {timeout_s:.3g} s"
        return self._endings.give_up(state, now, because=because, casualty=self._hung(state))

    def _hung(self, state: RequestState) -> Casualty | None:
        """Return the prefill worker of an overdue request, if the worker hangs.

        It does not hang if it has finished others meanwhile: then its queue was long.
        """
        worker = None if state.prefill is None else self._cluster.get(state.prefill)
        if worker is None or state.prefill == state.decode:
            return None
        if not self._cluster.prefills.hangs(worker.worker_id, state.request_id):
            return None
        return Casualty(worker.worker_id, worker.generation, state.is_alone)
