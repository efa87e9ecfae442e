"""One simulated prefill worker's parts of the prompts that its group computes.

`stages` has a prompt's way through all members; here is what one member does of it: whose turn
it is, one pass after the other, and pages.
"""

from collections.abc import Callable

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import PrefillFailed, StartPrefill
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.cluster.network_model import NetworkModel
from halfmoon_simulator.cluster.pipeline_prompt import PipelineMember, PipelinePart, PipelinePrompt
from halfmoon_simulator.cluster.sim_kvstore import SimKvstore
from halfmoon_simulator.costs.cost_file import CostFile


class PipelineWorker:
    """The staged prompts at one worker."""

    def __init__(
        self,
        worker: PipelineMember,
        spec: ClusterSpec,
        costs: CostFile,
        event_queue: EventQueue,
        network: NetworkModel,
        kvstores: Callable[[WorkerId], SimKvstore | None],
        host_of: Callable[[str], str],
        peers: Callable[[WorkerId], PipelineMember | None],
        n_output: Callable[[RequestId], int],
    ) -> None:
        """None yet; arguments as those of `SimPrefill`."""
        self._worker = worker
        self._spec = spec
        self._costs = costs
        self._event_queue = event_queue
        self._network = network
        self._kvstores = kvstores
        self._host_of = host_of
        self._peers = peers
        self._n_output = n_output
        #: In order of arrival; also of those that are over, while a pass of them is under way.
        self._parts: dict[RequestId, PipelinePart] = {}
        self._passing: PipelinePart | None = None

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, request_id: RequestId) -> bool:
        """Return whether this worker is the first stage of it, and has not said how it ended."""
        part = self._parts.get(request_id)
        return part is not None and part.share.is_first and not part.prompt.over

    @property
    def queued_tokens(self) -> int:
        """Tokens that this stage has yet to compute."""
        return sum(part.prompt.n_tokens - part.position for part in self._parts.values())

    @property
    def backlog_s(self) -> float:
        """Predicted seconds of them."""
        return sum(part.prompt.left_s(part) for part in self._parts.values())

    def held_pages(self) -> list[int]:
        """For audits."""
        return [page for part in self._parts.values() for page in part.pages]

    # -- beginnings and ends -----------------------------------------------------------------

    def begin(self, start: StartPrefill) -> None:
        """This worker is told to compute a prompt together with others."""
        workers = [self._worker]
        for stage in start.stages:
            if (peer := self._peers(stage.worker_id)) is None:
                failed = PrefillFailed(
                    request_id=start.request_id,
                    reason=f"stage {len(workers)}, {stage.worker_id}, can't be reached",
                    retryable=True,
                    culprit=stage.worker_id,
                )
                self._worker.say(failed)
                return
            workers.append(peer)
        prompt = PipelinePrompt(
            start,
            workers,
            chunk_tokens=self._spec.group_chunk_tokens,
            costs=self._costs,
            network=self._network,
            kvstores=self._kvstores,
            host_of=self._host_of,
            now=lambda: self._event_queue.now,
            ends=lambda request_id: self._n_output(request_id) <= 1,
        )
        # Further stages first, so that what stage 0 hands on finds them ready.
        for part in reversed(prompt.parts):
            part.worker.staging.add(part)

    def add(self, part: PipelinePart) -> None:
        """Take a part of this worker's."""
        self._parts[part.prompt.request_id] = part
        self.take_pages()

    def take_pages(self) -> None:
        """Give pages to the parts that have none, in their order."""
        for part in list(self._parts.values()):
            prompt = part.prompt
            if part.pages or prompt.over:
                continue
            if prompt.n_pages > self._worker.pages.n_free:
                return
            part.pages = self._worker.pages.allocate(prompt.n_pages)
            prompt.has_pages(part)
            self._worker.wake()

    def cancel(self, request_id: RequestId) -> None:
        """Stop a prompt whose first stage is here: the conductor gives it up."""
        self._parts[request_id].prompt.stop()

    def drop(self, part: PipelinePart) -> None:
        """Let go of the part of a prompt that is over, at once or after its pass."""
        if part.in_pass and not self._worker.dead:
            return
        del self._parts[part.prompt.request_id]
        self._worker.pages.release(part.pages)
        part.pages = []
        if not self._worker.dead:
            self._worker.pages_freed()
            self._worker.wake()

    def kvstore_lost(self, kvstore: SimKvstore) -> None:
        """Tell the prompts whose first stage is here."""
        for part in list(self._parts.values()):
            if part.share.is_first and not part.prompt.over:
                part.prompt.kvstore_lost(kvstore)

    def crash(self) -> None:
        """Lose the worker: nothing more is computed of its prompts."""
        for part in list(self._parts.values()):
            part.prompt.member_lost()

    # -- passes ------------------------------------------------------------------------------

    def try_start_pass(self, oldest: int | None) -> bool:
        """Begin a pass, or wait for a chunk, if that comes before the worker's other work.

        Args:
            oldest: number of the oldest prompt that could be computed otherwise; None: none.
        """
        for part in self._parts.values():
            if part.prompt.over or part.all_computed:
                continue
            if part.begun or (part.may_run and (oldest is None or part.number < oldest)):
                if part.may_run:
                    self._begin_pass(part)
                return True
        return False

    def _begin_pass(self, part: PipelinePart) -> None:
        prompt = part.prompt
        stop = min(part.arrived, part.position + prompt.chunk_tokens)
        seconds = prompt.seconds(part, stop)
        if not part.begun:
            prompt.begun(part)
        self._passing, part.in_pass, part.computed = part, True, False
        self._worker.staged_pass()
        self._event_queue.after(seconds, self._on_computed, part, stop)

    def _on_computed(self, part: PipelinePart, stop: int) -> None:
        if not self._worker.dead:
            part.computed, part.stop = True, stop
            self.end_pass()

    def end_pass(self) -> None:
        """End the pass under way if its arithmetic and its part's fetch are over."""
        part = self._passing
        if part is None or not part.computed or self._worker.dead:
            return
        if part.fetch is not None and not part.fetch.over:
            return
        self._passing, part.in_pass = None, False
        self._worker.staged_pass_over()
        prompt = part.prompt
        if prompt.over:
            self.drop(part)
            prompt.passes_over()
        else:
            if part.share.is_first:
                self._worker.computed_tokens += part.stop - part.position
            prompt.computed(part, part.stop)
        self._worker.wake()
