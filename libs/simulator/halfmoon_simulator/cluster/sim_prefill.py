"""A prefill worker of the simulated cluster: the live one's `PrefillMachine`, a modelled engine.

A pass ends when its arithmetic and the fetches of its requests are over (layer-wise loading: the
longer of both). A landing's bytes are on the wire from its prompt's first pass on.
"""

from collections.abc import Callable
from typing import assert_never

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    Cancel,
    ChangeRole,
    Hello,
    PrefillLoad,
    PrefillStopped,
    StartPrefill,
    ToConductor,
    ToPrefill,
    Unwelcome,
)
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_scheduling.prefill.long_chunks import LongChunks
from halfmoon_scheduling.prefill.prefill_commands import PrefillPass
from halfmoon_scheduling.prefill.prefill_events import FirstToken, PagesFreed, PassEnded
from halfmoon_scheduling.prefill.prefill_machine import PrefillMachine, PrefillRules
from halfmoon_scheduling.prefill.prefill_queue import PrefillQueue
from halfmoon_scheduling.prefill.queue_order import QUEUE_ORDERS
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.cluster.network_model import NetworkModel
from halfmoon_simulator.cluster.pipeline_worker import PipelineWorker
from halfmoon_simulator.cluster.sim_kvstore import SimKvstore
from halfmoon_simulator.cluster.sim_prompt_shell import SimPrompt, SimPromptShell
from halfmoon_simulator.costs.cost_file import CostFile

#: Any token that ends nothing.
FIRST_TOKEN_ID = 0
#: The modelled engine chooses this when a request's answer is as long as its trace says.
STOP_TOKEN_ID = 1


class SimPrefill:
    """One prefill worker."""

    def __init__(
        self,
        worker_id: WorkerId,
        host: str,
        spec: ClusterSpec,
        costs: CostFile,
        event_queue: EventQueue,
        network: NetworkModel,
        kvstores: Callable[[WorkerId], SimKvstore | None],
        host_of: Callable[[str], str],
        peers: "Callable[[WorkerId], SimPrefill | None]",
        n_output: Callable[[RequestId], int],
        answer: Callable[[WorkerId, ToConductor], None],
    ) -> None:
        """Create an idle worker.

        Args:
            worker_id: its name.
            host: where it runs; its home kvstore, if any, is on the same.
            spec: sizes.
            costs: times.
            event_queue: the clock.
            network: moves bytes.
            kvstores: returns a live kvstore by name.
            host_of: returns the host of a worker.
            peers: returns a live prefill worker by name.
            n_output: returns how many tokens this try of a request will get in all.
            answer: sends the conductor a message.
        """
        self.worker_id = worker_id
        self.host = host
        self.dead = False
        self.layout: KvLayout = costs.layout(spec.block_tokens)
        self.pages = PageAllocator(spec.pages(costs))
        self.machine = PrefillMachine(
            PrefillRules(spec.block_tokens),
            PrefillQueue(
                chunk_tokens=spec.chunk_tokens,
                max_requests=spec.max_requests,
                long_chunks=LongChunks(spec.long_chunk_limits, costs.pass_cost),
                order=QUEUE_ORDERS[spec.queue_order],
            ),
            self.pages,
        )
        self._costs = costs
        self._event_queue = event_queue
        self._host_of = host_of
        self._n_output = n_output
        self._answer = answer
        self._shell = SimPromptShell(
            worker_id, host, self.layout, self.machine, self, event_queue, network, kvstores, answer
        )
        #: Places of its prompts among all that it was given, and their predicted seconds.
        self._numbers: dict[RequestId, int] = {}
        self._predicted_s: dict[RequestId, float] = {}
        self._n_given = 0
        #: Its parts of prompts that a group computes.
        self.staging = PipelineWorker(
            self, spec, costs, event_queue, network, kvstores, host_of, peers, n_output
        )
        self._pass = PrefillPass(())
        self._passing = False
        self._pass_began_s = 0.0
        self._arithmetic_s = 0.0
        self._pass_computed = False
        #: Predicted seconds of all requests whose passes are not over.
        self._backlog_s = 0.0
        #: Seconds in passes so far, and tokens computed and fetched.
        self.busy_s = 0.0
        self.computed_tokens = 0
        self.cached_tokens = 0

    # -- what the cluster asks ---------------------------------------------------------------

    @property
    def backlog_s(self) -> float:
        """Predicted seconds until all that is here has its first token."""
        running_s = self._event_queue.now - self._pass_began_s if self._passing else 0.0
        return max(0.0, self._backlog_s + self.staging.backlog_s - running_s)

    @property
    def idle(self) -> bool:
        """Return whether no request is here."""
        return not self.machine.requests

    def load(self) -> PrefillLoad:
        """Return the load report of this moment."""
        queue = self.machine.queue
        return PrefillLoad(
            n_queued=len(queue) + len(self.staging),
            queued_tokens=queue.queued_tokens + self.staging.queued_tokens,
            free_pages=self.pages.n_free,
            n_pages=self.pages.n_pages,
        )

    def receive(self, message: ToPrefill) -> None:
        """Take a conductor's message."""
        match message:
            case StartPrefill() if message.stages:
                self.staging.begin(message)
            case StartPrefill():
                self._on_start(message)
            case Cancel(request_id=request_id) if request_id in self.staging:
                self.staging.cancel(request_id)
            case Cancel(request_id=request_id) if request_id in self.machine.requests:
                self._shell.cancel(request_id)
            case Cancel(request_id=request_id):
                self.say(PrefillStopped(request_id=request_id))
            case Hello() | Unwelcome() | ChangeRole():
                raise AssertionError(f"{self.worker_id} got {message!r}")
            case _:
                assert_never(message)

    def source_lost(self, kvstore: SimKvstore) -> None:
        """Fail the prompts that read from a lost kvstore; those that write to it do without."""
        self.staging.kvstore_lost(kvstore)
        self._shell.kvstore_lost(kvstore)

    def crash(self) -> None:
        """Lose the process, and with it all that it held elsewhere."""
        self.dead = True
        self._shell.crash()
        self.staging.crash()

    def say(self, message: ToConductor) -> None:
        """Send the conductor a message."""
        self._answer(self.worker_id, message)

    def _on_start(self, start: StartPrefill) -> None:
        n_tokens, size = len(start.token_ids), self.layout.block_size
        hoped = start.cached.n_blocks * size if start.cached else 0
        n_cached = min(hoped, (n_tokens - 1) // size * size)
        predicted_s = self._costs.prefill_s(n_tokens, n_cached)
        self._numbers[start.request_id] = self.next_number()
        self._shell.begin(start)
        if start.request_id in self.machine.requests:
            self._predicted_s[start.request_id] = predicted_s
            self._backlog_s += predicted_s

    # -- passes ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Begin a pass, if none is under way and one is due."""
        if self._passing or self.dead:
            return
        if len(self.staging):
            batch = self.machine.queue.next_batch()
            if self.staging.try_start_pass(self._numbers[batch[0].request_id] if batch else None):
                return
        now = self._event_queue.now
        due = self.machine.next_pass(now)
        if due is None:
            return
        self._pass, self._passing, self._pass_computed = due, True, False
        self._pass_began_s = now
        seconds = self._costs.pass_s
        for chunk in due.chunks:
            prompt = self._shell.prompts[chunk.request_id]
            seconds += self._costs.chunk_s(chunk.start, chunk.stop, first=not prompt.begun)
            if not prompt.begun:
                prompt.begun = True
                decode = prompt.start.landing.region.segment
                self._shell.begin_writing(prompt, self._host_of(decode))
        self._arithmetic_s = seconds
        self._event_queue.after(seconds, self._on_arithmetic_over)

    def _on_arithmetic_over(self) -> None:
        if not self.dead:
            self._pass_computed = True
            self.try_end_pass()

    def try_end_pass(self) -> None:
        """End the pass under way if its arithmetic and its fetches are over."""
        if not self._passing or not self._pass_computed or self.dead:
            return
        ended = self._pass
        prompts = [self._shell.prompts[chunk.request_id] for chunk in ended.chunks]
        if any(prompt.is_fetching for prompt in prompts):
            return
        took_s = self._event_queue.now - self._pass_began_s
        self.busy_s += took_s
        self._passing = False
        self.computed_tokens += sum(chunk.n_tokens for chunk in ended.chunks)
        tokens: dict[RequestId, FirstToken] = {
            chunk.request_id: STOP_TOKEN_ID
            if self._n_output(chunk.request_id) <= 1
            else FIRST_TOKEN_ID
            for chunk in ended.chunks
            if chunk.last
        }
        self._shell.post(PassEnded(tokens, took_s, took_s - self._arithmetic_s))

    def staged_pass(self) -> None:
        """Begin a pass of a staged prompt: none other begins until `staged_pass_over`."""
        self._passing, self._pass_computed = True, False
        self._pass_began_s = self._event_queue.now

    def staged_pass_over(self) -> None:
        """End the pass of a staged prompt."""
        self.busy_s += self._event_queue.now - self._pass_began_s
        self._passing = False

    # -- what the shell tells ----------------------------------------------------------------

    def on_computed(self, prompt: SimPrompt) -> None:
        """See `SimPrefillEngine.on_computed`."""
        self._backlog_s -= self._predicted_s.pop(prompt.request_id)

    def on_done(self, _: SimPrompt, n_cached: int) -> None:
        """See `SimPrefillEngine.on_done`."""
        self.cached_tokens += n_cached

    def on_ended(self, prompt: SimPrompt, message: ToConductor | None) -> None:
        """See `SimPrefillEngine.on_ended`."""
        del self._numbers[prompt.request_id]
        self._backlog_s -= self._predicted_s.pop(prompt.request_id, 0.0)
        if message is not None:
            self.say(message)
        self.staging.take_pages()

    # -- what its parts of staged prompts ask ------------------------------------------------

    def pages_freed(self) -> None:
        """Give pages that a staged prompt has left to prompts that wait for some."""
        self.staging.take_pages()
        self._shell.post(PagesFreed())

    def next_number(self) -> int:
        """Return the place of something that this worker is given."""
        self._n_given += 1
        return self._n_given

    def check(self) -> None:
        """Audit: pages are held by requests alone, and each has one owner."""
        self.machine.check()
        held = [page for request in self.machine.requests.values() for page in request.pages]
        held += self.staging.held_pages()
        assert len(set(held)) == len(held), "a page belongs to two requests"
        assert len(held) + self.pages.n_free == self.pages.n_pages
        assert self._shell.prompts.keys() == self.machine.requests.keys()
