"""Prompts that a simulated decode worker prefills by itself, in its steps.

The steps of a prompt are those of the prefill machine, as at a prefill worker; `PrefillRules` has
what differs: it is computed in its landing, one prompt a step, once its whole prefix is here.
`SimDecode` has the landing, and the step. A prompt is computed in one step, or in parts as live.
"""

from collections.abc import Callable
from dataclasses import dataclass

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import PrefillStopped, StartPrefill, ToConductor
from halfmoon_scheduling.prefill.long_chunks import LongChunkLimits, LongChunks
from halfmoon_scheduling.prefill.part_pacing import PartPacing
from halfmoon_scheduling.prefill.prefill_events import FirstToken, PassEnded
from halfmoon_scheduling.prefill.prefill_machine import PrefillMachine, PrefillRules
from halfmoon_scheduling.prefill.prefill_queue import PrefillChunk, PrefillQueue
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.cluster.network_model import NetworkModel
from halfmoon_simulator.cluster.sim_kvstore import SimKvstore
from halfmoon_simulator.cluster.sim_prompt_shell import SimPrompt, SimPromptShell
from halfmoon_simulator.costs.cost_file import CostFile

#: Tokens of a pass, and prompts: no bounds, since the conductor bounds what it places here.
_NO_BOUND = 2**62


@dataclass(frozen=True, slots=True)
class LocalPart:
    """A part of a prompt in a step."""

    chunk: PrefillChunk
    #: By which it makes the step longer, and those that it would take in a pass of its own.
    seconds: float
    alone_s: float


class SimLocalPrefills:
    """The prompts of one decode worker."""

    def __init__(
        self,
        worker_id: WorkerId,
        host: str,
        spec: ClusterSpec,
        costs: CostFile,
        event_queue: EventQueue,
        network: NetworkModel,
        kvstores: Callable[[WorkerId], SimKvstore | None],
        n_output: Callable[[RequestId], int],
        say: Callable[[WorkerId, ToConductor], None],
        ready: Callable[[], None],
    ) -> None:
        """Have no prompts yet.

        Args:
            worker_id: the decode worker.
            host: where it runs.
            spec: bounds of a part.
            costs: seconds of a part.
            event_queue: the clock.
            network: moves bytes.
            kvstores: returns a live kvstore by name.
            n_output: returns how many tokens this try of a request will get in all.
            say: sends the conductor a message.
            ready: called when a prompt waits for a step.
        """
        self._worker_id = worker_id
        self._event_queue = event_queue
        self._n_output = n_output
        self._say = say
        self._ready = ready
        layout = costs.layout(spec.block_tokens)
        self._costs = costs
        self._chunks: LongChunks | None = None
        if spec.local_prefill_step_s:
            limits = LongChunkLimits(_NO_BOUND, spec.local_prefill_step_s, layout.block_size)
            self._chunks = LongChunks(limits, costs.pass_cost)
        self.pacing = PartPacing(spec.local_prefill_tbt_s)
        self.machine = PrefillMachine(
            PrefillRules(layout.block_size, overlaps_fetch=False, max_pass_prompts=1),
            PrefillQueue(
                chunk_tokens=_NO_BOUND if self._chunks is None else layout.block_size,
                max_requests=_NO_BOUND,
                long_chunks=self._chunks,
            ),
            None,
        )
        self._shell = SimPromptShell(
            worker_id,
            host,
            layout,
            self.machine,
            self,
            event_queue,
            network,
            kvstores,
            say,
            puts_after_answer=True,
        )
        #: What the step under way computes of a prompt.
        self._part: LocalPart | None = None
        self._between_steps = False
        #: Tokens computed and fetched so far, and prompts done.
        self.computed_tokens = 0
        self.cached_tokens = 0
        self.n_done = 0

    def __contains__(self, request_id: RequestId) -> bool:
        """Return whether a prompt is being prefilled, or waits to be."""
        prompt = self._shell.prompts.get(request_id)
        return prompt is not None and not prompt.computed

    def begin(self, start: StartPrefill) -> None:
        """Take a prompt that the conductor wants to be prefilled here."""
        self._shell.begin(start)

    def take(self, step_s: float) -> LocalPart | None:
        """Return what to compute of a prompt in the next step, which begins now.

        Args:
            step_s: seconds of the step without it; 0: nothing runs.
        """
        if not step_s:
            self.pacing.on_idle()
        elif not self.pacing.is_due:
            return None
        if self._chunks is not None:
            self._chunks.reserved_s = step_s
        due = self.machine.next_pass(self._event_queue.now)
        if due is None:
            return None
        (chunk,) = due.chunks
        prompt = self._shell.prompts[chunk.request_id]
        seconds = self._costs.pass_s
        seconds += self._costs.chunk_s(chunk.start, chunk.stop, first=not prompt.begun)
        prompt.begun = True
        alone_s = seconds
        if step_s:  # one pass: what each pass takes is taken once
            seconds -= self._costs.shared_pass_s
            self.pacing.on_part(seconds)
        self._part = LocalPart(chunk, seconds, alone_s)
        return self._part

    def computed(self) -> None:
        """End the step of the part that was taken last; the caller takes the next by itself."""
        part, self._part = self._part, None
        assert part is not None, "a step ended that had no prompt"
        tokens: dict[RequestId, FirstToken] = {}
        if part.chunk.last:
            tokens[part.chunk.request_id] = int(self._n_output(part.chunk.request_id) <= 1)
        self._between_steps = True
        self._shell.post(PassEnded(tokens, part.alone_s))
        self._between_steps = False

    def cancel(self, request_id: RequestId) -> None:
        """Forget a prompt that is not done; what is done is kept all the same."""
        if request_id in self:
            self._shell.cancel(request_id)

    def source_lost(self, kvstore: SimKvstore) -> None:
        """Fail the prompts that read from a lost kvstore; those that write to it do without."""
        self._shell.kvstore_lost(kvstore)

    def crash(self) -> None:
        """Lose the process, and with it all that it held elsewhere."""
        self._shell.crash()

    # -- what the shell tells ----------------------------------------------------------------

    def wake(self) -> None:
        """See `SimPrefillEngine.wake`."""
        if not self._between_steps:
            self._ready()

    def try_end_pass(self) -> None:
        """See `SimPrefillEngine.try_end_pass`; no step waits for a fetch."""

    def on_computed(self, prompt: SimPrompt) -> None:
        """See `SimPrefillEngine.on_computed`."""
        self.computed_tokens += len(prompt.start.token_ids)

    def on_done(self, _: SimPrompt, n_cached: int) -> None:
        """See `SimPrefillEngine.on_done`."""
        self.n_done += 1
        self.computed_tokens -= n_cached
        self.cached_tokens += n_cached

    def on_ended(self, _: SimPrompt, message: ToConductor | None) -> None:
        """See `SimPrefillEngine.on_ended`; a decode worker does not answer a cancellation."""
        if message is not None and not isinstance(message, PrefillStopped):
            self._say(self._worker_id, message)

    def check(self) -> None:
        """Audit the machine."""
        self.machine.check()
