"""Hand requests over from prefill to decode, and follow them until decode has finished.

A request whose prefill is done starts decoding at once, waits before a decode worker that is too
busy, or is refused after all. Its first token is delivered when it starts.
"""

import msgspec

from halfmoon_protocol.blocks import root_hash
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import AnswerChain, Cancel, DecodeLoad, PrefillDone, StartDecode
from halfmoon_protocol.sampling import Stopping
from halfmoon_scheduling.admission.admission_policy import AdmissionVerdict
from halfmoon_scheduling.admission.limit_bounds import LimitBounds
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.cluster.send_if_live import send_if_live
from halfmoon_scheduling.commands import AnyCommand, Deliver
from halfmoon_scheduling.conductor.decision_log import DecisionLog
from halfmoon_scheduling.conductor.placer import Placer
from halfmoon_scheduling.conductor.prediction_error import PredictionErrors
from halfmoon_scheduling.conductor.request_endings import RequestEndings
from halfmoon_scheduling.conductor.request_table import RequestTable
from halfmoon_scheduling.events import RequestFinished
from halfmoon_scheduling.requests.request_state import Phase, RequestState


class DecodeHandover:
    """Start decoding of prefilled requests, and compare predictions with what happened."""

    def __init__(
        self,
        cluster: Cluster,
        placer: Placer,
        table: RequestTable,
        endings: RequestEndings,
        log: DecisionLog,
        bounds: LimitBounds | None,
    ) -> None:
        self._bounds = bounds
        self._cluster = cluster
        self._placer = placer
        self._table = table
        self._endings = endings
        self._log = log
        #: How far predictions were off.
        self.prediction_errors = PredictionErrors()

    def on_prefill_done(
        self, state: RequestState, done: PrefillDone, now: float
    ) -> list[AnyCommand]:
        """Start decoding, let the request wait for that, or refuse it."""
        placement, request = state.placement, state.request
        assert placement is not None
        if done.n_cached >= len(request.token_ids):  # at least one token was computed
            done = msgspec.structs.replace(done, n_cached=0)
        self._placer.learn(placement, request, done, now)
        errors = self.prediction_errors
        errors.observe("ttft", state.first_token_s - state.arrived_s, now - state.arrived_s)
        errors.on_prefill_done(placement.chosen, done)
        if self._bounds is not None:
            self._bounds.on_prefill_done(state, now)
        if done.finish:
            return self._deliver_only_token(state, done, now)
        verdict = self._table.late_admission.verdict(state, now)
        if self._table.late_admission.try_wait(state, verdict, done, now):
            self._release_prefill(state, now)
            return []
        if verdict.misses and self._table.late_admission.refuses:
            return self._refuse(state, verdict, now)
        return self._start_decode(state, done, now)

    def on_decode_load(self, worker_id: WorkerId, load: DecodeLoad) -> None:
        """Take in a decode worker's load report."""
        self._cluster.decodes.on_load(worker_id, load)
        if worker_id not in self._table.orphaned.decodes:
            self._table.decode_shares.on_load(worker_id)
        self._table.late_admission.notify(worker_id)

    def start_landed(self, now: float) -> list[AnyCommand]:
        """Start decoding of landed requests whose decode workers have room for them now."""
        commands: list[AnyCommand] = []
        for state, done in self._table.late_admission.ready(now):
            commands += self._start_decode(state, done, now)
        return commands

    def on_landed_timeout(self, state: RequestState, now: float) -> list[AnyCommand]:
        """Start a landed request that can't wait any longer, or refuse it."""
        late_admission = self._table.late_admission
        if late_admission.refuses:
            return self._refuse(state, late_admission.verdict(state, now), now)
        late_admission.on_deadline(state, now)
        return []

    def _deliver_only_token(
        self, state: RequestState, done: PrefillDone, now: float
    ) -> list[AnyCommand]:
        """Deliver the first token of a request that ends with it, and free its pages."""
        request_id, decode = state.request_id, state.decode
        assert decode is not None
        self._endings.end(state, now)
        cancel = Cancel(request_id=request_id)
        return [_deliver(state, done), *send_if_live(self._cluster, decode, cancel)]

    def _start_decode(self, state: RequestState, done: PrefillDone, now: float) -> list[AnyCommand]:
        """Deliver the first token, and have decode produce the others."""
        request, decode = state.request, state.decode
        assert decode is not None
        self._release_prefill(state, now)
        self._placer.on_landed(request, decode)
        n_tokens = len(request.token_ids)
        state.joined_tbt_s = self._cluster.decodes.running_tbt_s(decode, n_tokens)
        self._cluster.decodes.start(decode, state.request_id, now)
        state.phase = Phase.DECODING
        self._table.deadlines.set(state, float("inf"))
        needs_history = request.sampling.needs_history or bool(done.kv_transfer_params)
        start = StartDecode(
            request_id=request.request_id,
            first_token=done.first_token,
            sampling=request.sampling,
            stopping=self._stopping_for(decode, state),
            n_prompt=request.n_prompt,
            history=request.token_ids if needs_history else (),
            kv_transfer_params=done.kv_transfer_params,
            cache_salt=request.cache_salt if done.kv_transfer_params else "",
            answer_chain=self._answer_chain(state),
        )
        return [_deliver(state, done), *send_if_live(self._cluster, decode, start)]

    def _stopping_for(self, decode: WorkerId, state: RequestState) -> Stopping | None:
        """Return the end of a try for workers that do not keep it from the reservation."""
        info = self._cluster.get(decode)
        return state.stopping if info is None or info.features is None else None

    def _answer_chain(self, state: RequestState) -> AnswerChain | None:
        """Return where decode is to keep the answer's blocks: behind those of the prompt.

        A kvstore that was lost or restarted meanwhile does not have the prompt's.
        """
        layout, store, request = self._cluster.layout, state.store_in, state.request
        decode = None if state.decode is None else self._cluster.get(state.decode)
        if layout is None or store is None or decode is None or not decode.keeps_answers:
            return None
        if store.worker_id not in self._cluster:
            return None
        if self._cluster.address(store.worker_id) != store:
            return None
        size, hashes = layout.block_size, request.block_hashes
        tail = request.token_ids[len(hashes) * size :]
        if len(tail) >= size:
            return None  # the hashes are not those of the whole prompt
        root = root_hash(model=layout.model, salt=request.cache_salt, block_size=size)
        return AnswerChain(store, hashes[-1] if hashes else root, tail, request.tenant)

    def _release_prefill(self, state: RequestState, now: float) -> None:
        """Free a request's prefill worker, to which it has done no harm.

        A decode worker that prefilled by itself has yet to decode.
        """
        assert state.prefill is not None
        self._cluster.prefills.release(state.prefill, state.request_id, now)
        writers = [worker for worker in state.writers if worker != state.decode]
        self._table.quarantine.on_harmless(state, writers)

    def _refuse(
        self, state: RequestState, verdict: AdmissionVerdict, now: float
    ) -> list[AnyCommand]:
        assert state.placement is not None
        self._log.record(state, state.placement, verdict, now, "refused_late")
        return self._endings.refuse_landed(state, verdict.reason, verdict.retry_after_s, now)

    # -- while decode produces tokens --------------------------------------------------------

    def on_progress(self, state: RequestState) -> None:
        """Clear a suspect of which decode has produced a token."""
        self._table.quarantine.end(state)

    def on_finished(
        self, state: RequestState, event: RequestFinished, now: float
    ) -> list[AnyCommand]:
        """End a try whose last token decode has produced, and learn from its times."""
        assert state.placement is not None and state.decode is not None
        n_new = event.n_new
        decodes = self._cluster.decodes
        seconds = decodes.decoded_for(state.decode, state.request_id, now)
        decodes.observe_decode_time(seconds)
        if n_new > 1:
            predicted_s, observed_s = state.placement.tbt_s, seconds / (n_new - 1)
            self.prediction_errors.observe("tbt", predicted_s, observed_s)
            if self._bounds is not None:
                self._bounds.on_finished(state, observed_s, n_new - 1, now)
        if event.is_cut:
            reason = f"{state.decode} has no room for more of it"
            return self._endings.retry(state, reason, now)
        self._table.on_finished(state, n_new)
        self._endings.end(state, now)
        return []


def _deliver(state: RequestState, done: PrefillDone) -> Deliver:
    return Deliver(state.request_id, done.first_token, done.finish, done.n_cached)
