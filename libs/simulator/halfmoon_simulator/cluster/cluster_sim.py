"""Simulate a cluster: the live `Conductor`, with modelled engines and a modelled network.

Nothing here decides anything. `ClusterSim` takes the conductor's commands to workers and clients
and their answers back, each message on its way for `CostFile.message_s`, on one event queue.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from math import inf
from typing import assert_never

import msgspec

from halfmoon_protocol.blocks import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.kv_events import KvEventBatch
from halfmoon_protocol.messages import (
    ChangeRole,
    PrefillDone,
    Role,
    StartPrefill,
    ToConductor,
    ToDecode,
    ToKvstore,
    ToPrefill,
    ToWorker,
    WorkerInfo,
)
from halfmoon_scheduling.commands import (
    AnyCommand,
    Deliver,
    Fail,
    RefuseWorker,
    Reject,
    Resubmit,
    Send,
)
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.conductor.decision_log import Decision
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    KvChanged,
    MessageReceived,
    RequestFinished,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_scheduling.placement.modes import PLACEMENT_MODES
from halfmoon_scheduling.placement.placement_explanations import explain_placement
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.cluster.network_model import NetworkModel
from halfmoon_simulator.cluster.sim_clients import SimClients
from halfmoon_simulator.cluster.sim_decode import SimDecode
from halfmoon_simulator.cluster.sim_kvstore import SimKvstore
from halfmoon_simulator.cluster.sim_prefill import SimPrefill
from halfmoon_simulator.costs.cost_file import CostFile
from halfmoon_simulator.results.run_results import ClusterSample, Progress, RunResult
from halfmoon_simulator.results.token_intervals import TokenIntervals
from halfmoon_simulator.workloads.traces import TraceRequest

#: Calls between two reports of progress.
_PROGRESS_EVERY = 20_000


class BadScenario(ValueError):
    """A cluster or a fault that makes no sense; the text says what and what would."""


class WorkerFault(msgspec.Struct, frozen=True):
    """A worker is lost, and started again if `back_after_s` says when."""

    at_s: float
    worker_id: str
    back_after_s: float | None = None


#: Called with everything that the conductor is told and what it says, for a journal.
Watcher = Callable[[float, AnyEvent, list[AnyCommand]], None]


class ClusterSim:
    """One run of one workload on one cluster."""

    def __init__(
        self,
        spec: ClusterSpec,
        costs: CostFile,
        config: SchedulingConfig,
        workload: Sequence[TraceRequest],
        *,
        faults: Sequence[WorkerFault] = (),
        watcher: Watcher | None = None,
    ) -> None:
        """Create a cluster that has just started, with all arrivals ahead.

        Raises:
            BadScenario: a fault names no worker of the cluster.
        """
        self.spec = spec
        self.costs = costs
        self.config = config
        self.event_queue = EventQueue()
        self.conductor = Conductor(config)
        self.network = NetworkModel(
            self.event_queue,
            network_bytes_per_s=costs.network_bytes_per_s,
            local_bytes_per_s=costs.local_bytes_per_s,
        )
        self._watcher = watcher
        #: The newest decision of the conductor that has been explained in a record.
        self._explained: Decision | None = None
        self.samples: list[ClusterSample] = []
        self.prefills: dict[WorkerId, SimPrefill] = {}
        self.decodes: dict[WorkerId, SimDecode] = {}
        self.kvstores: dict[WorkerId, SimKvstore] = {}
        #: Seconds of passes and steps, and tokens, of workers that are gone.
        self._lost_prefill_s = self._lost_decode_s = 0.0
        self._lost_computed = self._lost_cached = 0
        self._lost_copied_bytes = 0
        self._lost_from_memory = self._lost_from_disk = 0
        self._hosts: dict[str, str] = {}
        self._generations: dict[WorkerId, int] = {}
        #: What each worker is, also while it is lost.
        self._roles: dict[WorkerId, str] = {}
        #: What live workers become once they have finished what they have.
        self._changing: dict[WorkerId, Role] = {}
        self._n_role_changes = 0
        self._last_loads: dict[WorkerId, ToConductor] = {}
        # Chains of live workers have these block sizes alone.
        is_live_size = MIN_BLOCK_SIZE <= spec.block_tokens <= MAX_BLOCK_SIZE
        self._keeps_answers = spec.keep_answers and is_live_size
        n_kvstore = spec.n_prefill if spec.n_kvstore is None else spec.n_kvstore
        hosts = [f"host-p{i}" for i in range(spec.n_prefill)]
        hosts += [f"host-d{i}" for i in range(spec.n_decode)]
        for i in range(n_kvstore):
            self._hosts[f"kvstore-{i}"] = hosts[i]
        for i in range(spec.n_prefill):
            self._hosts[f"prefill-{i}"] = f"host-p{i}"
        for i in range(spec.n_decode):
            self._hosts[f"decode-{i}"] = f"host-d{i}"
        for name in self._hosts:
            self._roles[WorkerId(name)] = name.split("-")[0]
            self._join(WorkerId(name))
        self.clients = SimClients(
            workload,
            self.event_queue,
            self._post,
            block_tokens=spec.block_tokens,
            max_new_tokens=spec.max_new_tokens,
        )
        for fault in faults:
            if fault.worker_id not in self._hosts:
                raise BadScenario(
                    f"no worker {fault.worker_id!r} to lose, there are: {', '.join(self._hosts)}"
                )
            times_s = (fault.at_s, fault.back_after_s or 0.0)
            if not all(0 <= seconds < inf for seconds in times_s):
                raise BadScenario(
                    f"the fault of {fault.worker_id} is at {fault.at_s:g} s, its end after"
                    f" {times_s[1]:g} s: seconds are numbers from 0"
                )
            self.event_queue.at(
                fault.at_s, self._lose, WorkerId(fault.worker_id), fault.back_after_s
            )
        self.event_queue.after(spec.report_s, self._report)
        self.event_queue.after(spec.tick_s, self._tick)
        self.event_queue.at(0.0, self._sample)

    # -- running -----------------------------------------------------------------------------

    def step(self) -> bool:
        """Make one thing happen; False once every request has ended."""
        return not self.clients.all_over and self.event_queue.step()

    def run(self, progress: Progress | None = None) -> RunResult:
        """Go on until every request has ended."""
        n = 0
        while self.step():
            n += 1
            if progress is not None and n % _PROGRESS_EVERY == 0:
                progress(self.event_queue.now, self.clients.n_over, self.n_requests)
        return self.result()

    @property
    def n_requests(self) -> int:
        """Requests of the workload."""
        return self.clients.n_asked

    def result(self) -> RunResult:
        """Return the results so far."""
        return RunResult(
            records=self.clients.records,
            samples=self.samples,
            ttft_slo_s=self.config.ttft_slo_s,
            tbt_slo_s=self.config.tbt_slo_s,
            prefill_busy_s=self._lost_prefill_s + sum(p.busy_s for p in self.prefills.values()),
            decode_busy_s=self._lost_decode_s + sum(d.busy_s for d in self.decodes.values()),
            n_prefill=self.spec.n_prefill,
            n_decode=self.spec.n_decode,
            n_events=self.event_queue.n_processed,
            n_role_changes=self._n_role_changes,
            copied_bytes=self._lost_copied_bytes
            + sum(kvstore.copier.copied_bytes for kvstore in self.kvstores.values()),
            n_from_memory=self._lost_from_memory
            + sum(kvstore.n_from_memory for kvstore in self.kvstores.values()),
            n_from_disk=self._lost_from_disk
            + sum(kvstore.n_from_disk for kvstore in self.kvstores.values()),
        )

    # -- conductor ---------------------------------------------------------------------------

    def _post(self, event: AnyEvent) -> None:
        """Let the conductor handle an event; what follows is put on the event queue."""
        commands = self.conductor.handle(event, self.event_queue.now)
        if self._watcher is not None:
            self._watcher(self.event_queue.now, event, commands)
        if self.config.kept_decisions:
            self._explain_decisions()
        for command in commands:
            self._perform(command)

    def _explain_decisions(self) -> None:
        """Write into records why the conductor decided as it did in its last event."""
        decisions = self.conductor.decisions
        mode = PLACEMENT_MODES[self.config.placement]
        new = list(takewhile(lambda decision: decision is not self._explained, reversed(decisions)))
        for decision in reversed(new):
            is_placed = decision.outcome == "placed"
            why = explain_placement(decision.placement, mode) if is_placed else decision.reason
            self.clients.explain(decision.request_id, why)
        self._explained = decisions[-1] if decisions else None

    def _perform(self, command: AnyCommand) -> None:
        match command:
            case Send(worker_id=worker_id, message=message):
                if isinstance(message, StartPrefill):
                    decode = message.landing.region.segment
                    self.clients.placed(message.request_id, worker_id, decode)
                generation = self._generations[worker_id]
                self.event_queue.after(
                    self.costs.message_s, self._arrive, worker_id, generation, message
                )
            case Deliver():
                self.clients.deliver(command)
            case Reject():
                self.clients.reject(command)
            case Resubmit(request_id=request_id):
                self.event_queue.after(0.0, self.clients.resubmit, request_id)
            case Fail(request_id=request_id, reason=reason):
                self.clients.fail(request_id, reason)
            case RefuseWorker(worker_id=worker_id, reason=reason):
                raise BadScenario(f"{worker_id} does not fit the cluster: {reason}")
            case _:
                assert_never(command)

    def _arrive(self, worker_id: WorkerId, generation: int, message: ToWorker) -> None:
        """Hand a message to its worker, unless that was lost since."""
        if generation != self._generations[worker_id]:
            return
        if isinstance(message, ChangeRole):
            self._on_change_role(worker_id, message.role)
            return
        if (prefill := self.prefills.get(worker_id)) is not None:
            assert isinstance(message, ToPrefill)
            prefill.receive(message)
        elif (decode := self.decodes.get(worker_id)) is not None:
            assert isinstance(message, ToDecode)
            decode.receive(message)
        elif (kvstore := self.kvstores.get(worker_id)) is not None:
            assert isinstance(message, ToKvstore)
            kvstore.receive(message)

    def _answer(self, worker_id: WorkerId, message: ToConductor) -> None:
        """Send a worker's message to the conductor, even if the worker is lost meanwhile."""
        self.event_queue.after(self.costs.message_s, self._hear, worker_id, message)

    def _hear(self, worker_id: WorkerId, message: ToConductor) -> None:
        if isinstance(message, PrefillDone):
            self.clients.prefilled(message.request_id)
        self._post(MessageReceived(worker_id, message))

    def _publish(self, worker_id: WorkerId, batch: KvEventBatch) -> None:
        self.event_queue.after(self.costs.message_s, self._post, KvChanged(worker_id, batch))

    def _decoded(self, request_id: RequestId, intervals: TokenIntervals) -> None:
        self.event_queue.after(self.costs.message_s, self._all_decoded, request_id, intervals)

    def _all_decoded(self, request_id: RequestId, intervals: TokenIntervals) -> None:
        n_new = self.clients.n_output(request_id)
        self.clients.decoded(request_id, n_new, intervals)
        self._post(RequestFinished(request_id, n_new))

    # -- workers -----------------------------------------------------------------------------

    def _join(self, worker_id: WorkerId) -> None:
        role = self._roles[worker_id]
        generation = self._generations[worker_id] = self._generations.get(worker_id, 0) + 1
        host = self._hosts[worker_id]
        spec, costs = self.spec, self.costs
        if role == "prefill":
            self.prefills[worker_id] = SimPrefill(
                worker_id,
                host,
                spec,
                costs,
                self.event_queue,
                self.network,
                kvstores=self.kvstores.get,
                host_of=self._hosts.__getitem__,
                peers=self.prefills.get,
                n_output=self.clients_n_output,
                answer=self._answer,
            )
        elif role == "decode":
            self.decodes[worker_id] = SimDecode(
                worker_id,
                host,
                spec,
                costs,
                self.event_queue,
                self.network,
                kvstores=self.kvstores.get,
                n_output=self.clients_n_output,
                answer=self._answer,
                finished=self._decoded,
                interrupted=self._interrupted,
                chain_of=lambda request_id: self.clients.chain_of(request_id),
            )
        else:
            self.kvstores[worker_id] = SimKvstore(
                worker_id,
                host,
                spec,
                spec.slots(costs),
                self.event_queue,
                self.network,
                costs.layout(spec.block_tokens).block_bytes,
                peers=self.kvstores.get,
                publish=self._publish,
                answer=self._answer,
            )
        self._post(WorkerJoined(self._info(worker_id, role, generation)))

    def clients_n_output(self, request_id: RequestId) -> int:
        """See `SimClients.n_output`; workers are there before the clients are."""
        return self.clients.n_output(request_id)

    def _interrupted(self, request_id: RequestId, n_tokens: int, intervals: TokenIntervals) -> None:
        self.clients.decoded(request_id, n_tokens, intervals)

    def _info(self, worker_id: WorkerId, role: str, generation: int) -> WorkerInfo:
        n_blocks = self.spec.slots(self.costs) if role == "kvstore" else self.spec.pages(self.costs)
        born, number = worker_id.split("-")
        stage = self.spec.stage(int(number), self.costs) if born == "prefill" else None
        return WorkerInfo(
            worker_id=worker_id,
            role=msgspec.convert(role, Role),
            generation=generation,
            host=self._hosts[worker_id],
            commands=f"simulated://{worker_id}/commands",
            events=f"simulated://{worker_id}/events",
            layout=self.costs.layout(self.spec.block_tokens),
            model=self.costs.name,
            max_context=0 if role == "kvstore" else self.costs.max_context,
            n_blocks=n_blocks,
            prefill_cost=self.costs.prefill if role != "kvstore" else None,
            local_prefill_tokens=self.spec.local_prefill_tokens if role == "decode" else 0,
            local_prefill_step_s=self.spec.local_prefill_step_s if role == "decode" else 0.0,
            local_prefill_tbt_s=self.spec.local_prefill_tbt_s if role == "decode" else 0.0,
            decode_cost=self.costs.decode if role == "decode" else None,
            replicates=role == "kvstore",
            keeps_answers=role == "decode" and self._keeps_answers,
            stage=stage,
            # A stage of a group stays what it is.
            roles=("prefill", "decode") if role != "kvstore" and stage is None else (),
        )

    def _on_change_role(self, worker_id: WorkerId, role: Role) -> None:
        """Drain a worker that is to change its role; it changes once it is idle."""
        if worker_id in self._changing or self._roles[worker_id] == role:
            return
        self._changing[worker_id] = role
        info = self._info(worker_id, self._roles[worker_id], self._generations[worker_id])
        draining = WorkerJoined(msgspec.structs.replace(info, draining=True))
        self.event_queue.after(self.costs.message_s, self._post, draining)

    def _change_roles(self) -> None:
        for worker_id, role in list(self._changing.items()):
            worker = self.prefills.get(worker_id) or self.decodes.get(worker_id)
            if worker is not None and worker.idle:
                self._roles[worker_id] = role
                self._n_role_changes += 1
                self._lose(worker_id, self.spec.role_change_s, "it changes its role")

    def _lose(
        self, worker_id: WorkerId, back_after_s: float | None, why: str = "lost by the scenario"
    ) -> None:
        """Lose a worker; the conductor notices it a message's time later."""
        self._changing.pop(worker_id, None)
        if (prefill := self.prefills.pop(worker_id, None)) is not None:
            prefill.crash()
            self._lost_prefill_s += prefill.busy_s
            self._lost_computed += prefill.computed_tokens
            self._lost_cached += prefill.cached_tokens
        elif (decode := self.decodes.pop(worker_id, None)) is not None:
            decode.crash()
            self._lost_decode_s += decode.busy_s
            self._lost_computed += decode.local.computed_tokens
            self._lost_cached += decode.local.cached_tokens
        elif (kvstore := self.kvstores.pop(worker_id, None)) is not None:
            kvstore.crash()
            self._lost_copied_bytes += kvstore.copier.copied_bytes
            self._lost_from_memory += kvstore.n_from_memory
            self._lost_from_disk += kvstore.n_from_disk
            for other in self.kvstores.values():
                other.copier.source_lost(kvstore)
            for reader in self.prefills.values():
                reader.source_lost(kvstore)
            for decode in self.decodes.values():
                decode.local.source_lost(kvstore)
                decode.answers.kvstore_lost(kvstore)
        else:
            return
        self._generations[worker_id] += 1  # what is under way to it is lost too
        self._last_loads.pop(worker_id, None)
        lost = WorkerLost(worker_id, why)
        self.event_queue.after(self.costs.message_s, self._post, lost)
        if back_after_s is not None:
            self.event_queue.after(back_after_s + self.costs.message_s, self._join, worker_id)

    # -- time --------------------------------------------------------------------------------

    def _report(self) -> None:
        """Report the workers' loads, where they have changed."""
        workers: list[SimPrefill | SimDecode] = [*self.prefills.values(), *self.decodes.values()]
        for worker in workers:
            load = worker.load()
            if load != self._last_loads.get(worker.worker_id):
                self._last_loads[worker.worker_id] = load
                self._post(MessageReceived(worker.worker_id, load))
        self.event_queue.after(self.spec.report_s, self._report)

    def _tick(self) -> None:
        for decode in self.decodes.values():
            decode.expire()
        self._change_roles()
        self._post(Tick())
        self.event_queue.after(self.spec.tick_s, self._tick)

    def _sample(self) -> None:
        backlogs = [worker.backlog_s for worker in self.prefills.values()] or [0.0]
        steps = [worker.step_s for worker in self.decodes.values()] or [0.0]
        self.samples.append(
            ClusterSample(
                at_s=self.event_queue.now,
                prefill_backlog_s=sum(backlogs) / len(backlogs),
                prefill_backlog_max_s=max(backlogs),
                decode_step_s=sum(steps) / len(steps),
                decode_step_max_s=max(steps),
                n_running=sum(worker.batch.n_running for worker in self.decodes.values()),
                n_ended=self.clients.n_over,
                n_rejected=self.clients.n_rejected,
                computed_tokens=self._lost_computed
                + sum(worker.computed_tokens for worker in self.prefills.values())
                + sum(worker.local.computed_tokens for worker in self.decodes.values()),
                cached_tokens=self._lost_cached
                + sum(worker.cached_tokens for worker in self.prefills.values())
                + sum(worker.local.cached_tokens for worker in self.decodes.values()),
            )
        )
        self.event_queue.after(self.spec.sample_s, self._sample)

    def check(self) -> None:
        """Audit everything."""
        self.conductor.check()
        self.network.check()
        self.clients.check()
        workers: list[SimPrefill | SimDecode | SimKvstore] = [
            *self.prefills.values(),
            *self.decodes.values(),
            *self.kvstores.values(),
        ]
        for worker in workers:
            worker.check()
