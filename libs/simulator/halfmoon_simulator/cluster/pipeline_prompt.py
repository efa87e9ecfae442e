"""A group's way with one prompt in the simulated world: chunks through the stages.

    StartPrefill ─▶ stage 0 ─▶ lease, room ─▶ a part at every stage ─▶ PrefillDone by stage 0
                               part: pages ─▶ fetch ┬─▶ chunks ─▶ landing, put
                                         activations┘

Each stage holds, fetches and writes the KV of its layers: its share of the bytes. A part takes
its turn in its worker's queue by arrival; until its first chunk is there, younger prompts pass;
from then on it holds the worker, also while it waits for the next chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    PrefillDone,
    PrefillFailed,
    PrefillStopped,
    StartPrefill,
    ToConductor,
)
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_scheduling.prefill.prompt_share import PromptShare
from halfmoon_simulator.cluster.network_model import NetworkModel, SimTransfer
from halfmoon_simulator.cluster.sim_holdings import SimHoldings
from halfmoon_simulator.cluster.sim_kvstore import SimKvstore
from halfmoon_simulator.costs.cost_file import CostFile


class PipelineParts(Protocol):
    """Hold the parts of one worker; see `PipelineWorker`."""

    def add(self, part: "PipelinePart") -> None:
        """Take a part of this worker's."""
        ...

    def drop(self, part: "PipelinePart") -> None:
        """Let go of a part, at once or after its pass."""
        ...

    def end_pass(self) -> None:
        """End the pass under way if its arithmetic and its part's fetch are over."""
        ...


class PipelineMember(Protocol):
    """Compute one stage of a group's prompts; see `SimPrefill`."""

    worker_id: WorkerId
    host: str
    dead: bool
    layout: KvLayout
    pages: PageAllocator
    computed_tokens: int
    cached_tokens: int

    @property
    def staging(self) -> PipelineParts:
        """The parts of this worker."""
        ...

    def next_number(self) -> int:
        """Return the place of something that this worker is given."""
        ...

    def wake(self) -> None:
        """Begin a pass, if none is under way and one is due."""
        ...

    def pages_freed(self) -> None:
        """Give freed pages to prompts that wait for some."""
        ...

    def staged_pass(self) -> None:
        """Begin a pass of a staged prompt."""
        ...

    def staged_pass_over(self) -> None:
        """End the pass of a staged prompt."""
        ...

    def say(self, message: ToConductor) -> None:
        """Send the conductor a message."""
        ...


@dataclass(eq=False, slots=True)
class PipelinePart:
    """One stage's share of one prompt."""

    prompt: "PipelinePrompt"
    worker: PipelineMember
    share: PromptShare
    #: Its place among all that this worker was given.
    number: int
    #: Tokens computed here, and those whose activations have come.
    position: int = 0
    arrived: int = 0
    pages: list[int] = field(default_factory=list)
    #: Its first chunk is computed, or being so.
    begun: bool = False
    #: Whether a pass of it is under way, and whether its arithmetic is over.
    in_pass: bool = False
    computed: bool = False
    #: Where that pass ends.
    stop: int = 0
    fetch: SimTransfer | None = None
    landing: SimTransfer | None = None
    put: SimTransfer | None = None

    @property
    def all_computed(self) -> bool:
        """Return whether every chunk has left this stage."""
        return self.position == self.prompt.n_tokens

    @property
    def may_run(self) -> bool:
        """Return whether there is a chunk to compute here now."""
        return bool(self.pages) and not self.in_pass and self.arrived > self.position


class PipelinePrompt:
    """One prompt at a group; what its members share."""

    def __init__(
        self,
        start: StartPrefill,
        workers: Sequence[PipelineMember],
        *,
        chunk_tokens: int,
        costs: CostFile,
        network: NetworkModel,
        kvstores: Callable[[WorkerId], SimKvstore | None],
        host_of: Callable[[str], str],
        now: Callable[[], float],
        ends: Callable[[RequestId], bool],
    ) -> None:
        """Create the parts of a prompt that has just arrived; it begins when stage 0 has pages.

        Args:
            start: what the conductor said.
            workers: the members, in order of their stages; all alive.
            chunk_tokens: tokens of a chunk at the most.
            costs: times.
            network: moves bytes.
            kvstores: a live kvstore by name.
            host_of: the host of a worker.
            now: the clock, seconds.
            ends: whether a request is over with its first token.
        """
        self.start = start
        self.n_tokens = len(start.token_ids)
        self.n_cached = 0
        self.chunk_tokens = chunk_tokens
        self.parts = [
            PipelinePart(self, worker, PromptShare(stage, len(workers)), worker.next_number())
            for stage, worker in enumerate(workers)
        ]
        self.layout = workers[0].layout
        self._costs = costs
        self._network = network
        self._holdings = SimHoldings(workers[0].worker_id, start, kvstores)
        self._host_of = host_of
        self._now = now
        self._ends = ends
        self._arrived_s = now()
        self._computing_since_s = -1.0
        self._computed_s = -1.0
        self._fetch_s = 0.0
        #: Whether stage 0 waits for blocks from a kvstore's disk.
        self._leasing = False
        self.answered = False
        #: Over: by the end, a failure or a cancellation.
        self.over = False
        self._say_stopped = False

    # -- what the workers ask ----------------------------------------------------------------

    @property
    def request_id(self) -> RequestId:
        """The id of this try."""
        return self.start.request_id

    @property
    def _head(self) -> PipelineMember:
        return self.parts[0].worker

    @property
    def n_pages(self) -> int:
        """Pages of one stage: they hold its layers alone."""
        return self.parts[0].share.n_pages(self.layout.blocks_for(self.n_tokens))

    def seconds(self, part: PipelinePart, stop: int) -> float:
        """Return the seconds of a stage's next chunk."""
        once_s = self._costs.prefill.c0_s - self._costs.pass_s
        chunk_s = self._costs.chunk_s(part.position, stop, first=False)
        first = part.share.is_first and not part.begun
        return (self._costs.pass_s + chunk_s) / len(self.parts) + (once_s if first else 0.0)

    def left_s(self, part: PipelinePart) -> float:
        """Predicted seconds that a stage has yet to compute."""
        if part.all_computed:
            return 0.0
        return self._costs.prefill_s(self.n_tokens, part.position) / len(self.parts)

    # -- a prompt's way ----------------------------------------------------------------------

    def has_pages(self, part: PipelinePart) -> None:
        """Take note that a stage has pages; stage 0 then leases and reserves for all of them."""
        if part.share.is_first:
            self._lease()

    def _lease(self) -> None:
        n_blocks = 0
        if self.start.cached is not None:
            size = self.layout.block_size
            n_blocks = min(self.start.cached.n_blocks, (self.n_tokens - 1) // size)
        self._leasing = True
        self._holdings.lease(n_blocks, self._on_leased)

    def _on_leased(self, n_found: int) -> None:
        """Let all stages begin, with the prefix that was leased."""
        self._leasing = False
        self.n_cached = n_found * self.layout.block_size
        self._make_room()
        for each in self.parts:
            each.position = each.arrived = self.n_cached
            self._fetch(each)
        self.parts[0].arrived = self.n_tokens
        self._head.wake()

    def _make_room(self) -> None:
        start = self.start
        is_source = start.cached is not None and start.cached.kvstore == start.store_in
        self._holdings.reserve(self.n_cached // self.layout.block_size if is_source else 0)

    def _fetch(self, part: PipelinePart) -> None:
        source = self._holdings.source
        if source is None:
            return
        began_s = self._now()

        def fetched() -> None:
            self._fetch_s = max(self._fetch_s, self._now() - began_s)
            part.worker.staging.end_pass()

        part.fetch = self._move(source.host, part, self.n_cached, fetched)

    def begun(self, part: PipelinePart) -> None:
        """Begin a stage's first chunk: its KV is on the wire from now on."""
        part.begun = True
        if part.share.is_first:
            self._computing_since_s = self._now()
        size = self.layout.block_size
        n_landing = self.layout.blocks_for(self.n_tokens) * size
        decode = self._host_of(self.start.landing.region.segment)
        part.landing = self._move(part.worker.host, part, n_landing, self._settle, to=decode)
        home = self._holdings.home
        if home is not None and self._holdings.n_put:
            n_put = self._holdings.n_put * size
            part.put = self._move(part.worker.host, part, n_put, self._keep, to=home.host)

    def _move(
        self, source: str, part: PipelinePart, n_tokens: int, done: Callable[[], None], to: str = ""
    ) -> SimTransfer:
        """Move bytes of one stage's layers from a host to another, by default the stage's own."""
        n_bytes = n_tokens * self.layout.token_bytes // len(self.parts)
        return self._network.start(source, to or part.worker.host, n_bytes, done)

    def computed(self, part: PipelinePart, stop: int) -> None:
        """End a stage's chunk: its activations go to the next stage."""
        n_tokens = stop - part.position
        part.position = stop
        if not part.share.is_last:
            self._hand_on(part, self.parts[part.share.stage + 1], stop, n_tokens)
        elif part.all_computed:
            self._computed_s = self._now()
        self._settle()

    def _hand_on(self, part: PipelinePart, to: PipelinePart, stop: int, n_tokens: int) -> None:
        def arrived() -> None:
            if not self.over:
                to.arrived = max(to.arrived, stop)
                to.worker.wake()

        n_bytes = n_tokens * self._costs.activation_bytes
        self._network.start(part.worker.host, to.worker.host, n_bytes, arrived)

    def _settle(self) -> None:
        """Answer once all is computed and all has landed."""
        if self.answered or self.over or self._computed_s < 0:
            return
        if any(part.landing is None or not part.landing.over for part in self.parts):
            return
        self.answered = True
        self._head.cached_tokens += self.n_cached
        self._holdings.release_lease()
        ends = self._ends(self.request_id)
        self._head.say(
            PrefillDone(
                request_id=self.request_id,
                first_token=int(ends),
                finish="stop" if ends else "",
                n_cached=self.n_cached,
                queue_s=self._computing_since_s - self._arrived_s,
                compute_s=self._computed_s - self._computing_since_s,
                drain_s=self._now() - self._computed_s,
                fetched_bytes=self.n_cached * self.layout.token_bytes,
                fetch_s=self._fetch_s,
            )
        )
        self._keep()

    def _keep(self) -> None:
        """Serve the new blocks once every stage has written its part, and free the pages."""
        if not self.answered or self.over:
            return
        if any(part.put is not None and not part.put.over for part in self.parts):
            return
        self._holdings.commit()
        self._end()

    # -- other ends --------------------------------------------------------------------------

    def stop(self) -> None:
        """Compute no more; stage 0 says so when no stage is in a pass of it."""
        self._say_stopped = True
        self._end()
        self.passes_over()

    def passes_over(self) -> None:
        """Answer a cancellation if no stage is in a pass of the prompt any more."""
        if self._say_stopped and not any(
            part.in_pass and not part.worker.dead for part in self.parts
        ):
            self._say_stopped = False
            if self._head.dead:
                return
            self._head.say(PrefillStopped(request_id=self.request_id))

    def kvstore_lost(self, kvstore: SimKvstore) -> None:
        """Fail if the prompt reads from a lost kvstore; do without if it writes to it."""
        if self._holdings.home is kvstore:
            self._holdings.home = None
            for part in self.parts:
                if part.put is not None:
                    self._network.cancel(part.put)
                    part.put = None
            self._keep()
        if self._holdings.source is kvstore and self._leasing:
            self._holdings.source = None
            self._on_leased(0)
            return
        fetching = any(part.fetch is not None and not part.fetch.over for part in self.parts)
        if self._holdings.source is kvstore and fetching and not self.over:
            self._holdings.source = None
            self._end()
            self._head.say(
                PrefillFailed(
                    request_id=self.request_id,
                    reason=f"{kvstore.worker_id} is lost",
                    retryable=True,
                    culprit=kvstore.worker_id,
                )
            )

    def member_lost(self) -> None:
        """Compute no more: a member is lost, which the conductor notices by itself."""
        self._end()
        self.passes_over()

    def _end(self) -> None:
        """Let go of everything; parts in a pass are let go of after it."""
        if self.over:
            return
        self.over = True
        self._holdings.release()
        for part in self.parts:
            for transfer in (part.fetch, part.landing, part.put):
                if transfer is not None:
                    self._network.cancel(transfer)
            part.worker.staging.drop(part)
            part.worker.staging.end_pass()  # if it only waited for its fetch
