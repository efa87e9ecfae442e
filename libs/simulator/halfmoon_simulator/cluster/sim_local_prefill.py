"""Prompts that a simulated decode worker prefills by itself, in one of its steps.

The steps of a prompt are those of the prefill machine, as at a prefill worker; `PrefillRules` has
what differs: it is computed in its landing, one prompt a step, once its whole prefix is here.
`SimDecode` has the landing, and the step.
"""

from collections.abc import Callable

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import PrefillStopped, StartPrefill, ToConductor
from halfmoon_scheduling.prefill.prefill_events import FirstToken, PassEnded
from halfmoon_scheduling.prefill.prefill_machine import PrefillMachine, PrefillRules
from halfmoon_scheduling.prefill.prefill_queue import PrefillChunk, PrefillQueue
from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.cluster.network_model import NetworkModel
from halfmoon_simulator.cluster.sim_kvstore import SimKvstore
from halfmoon_simulator.cluster.sim_prompt_shell import SimPrompt, SimPromptShell

#: Tokens of a pass, and prompts: no bounds, since the conductor bounds what it places here.
_NO_BOUND = 2**62


class SimLocalPrefills:
    """The prompts of one decode worker."""

    def __init__(
        self,
        worker_id: WorkerId,
        host: str,
        layout: KvLayout,
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
            layout: of its KV.
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
        self.machine = PrefillMachine(
            PrefillRules(layout.block_size, overlaps_fetch=False, max_pass_prompts=1),
            PrefillQueue(chunk_tokens=_NO_BOUND, max_requests=_NO_BOUND),
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
        #: The prompt of the step under way, and when that began.
        self._chunk: PrefillChunk | None = None
        self._began_s = 0.0
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

    def take(self) -> PrefillChunk | None:
        """Return the prompt to compute in the next step, which begins now, as one chunk."""
        due = self.machine.next_pass(self._event_queue.now)
        if due is None:
            return None
        self._began_s = self._event_queue.now
        (self._chunk,) = due.chunks
        return self._chunk

    def computed(self) -> None:
        """End the step of the prompt that was taken last; the caller takes the next by itself."""
        chunk, self._chunk = self._chunk, None
        assert chunk is not None, "a step ended that had no prompt"
        token: FirstToken = int(self._n_output(chunk.request_id) <= 1)
        self._between_steps = True
        self._shell.post(
            PassEnded({chunk.request_id: token}, self._event_queue.now - self._began_s)
        )
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
