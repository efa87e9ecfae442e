"""Perform the prefill machine's commands on modelled kvstores and a modelled network.

The engine is another class's: a prefill worker's runs passes, a decode worker's has its steps.
Kvstores answer at once, so an outcome is posted before the next command is performed. A lease of
blocks that are on a kvstore's disk is answered later.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, assert_never

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import PrefillDone, StartPrefill, ToConductor
from halfmoon_scheduling.prefill.prefill_commands import (
    EndRequest,
    FetchPrefix,
    FreeSlot,
    KeepBlocks,
    PrefillCommand,
    ReleaseHoldings,
    ReportDone,
    ReserveRoom,
    SendChunk,
    SettleTransfers,
    StartStages,
    WakeEngine,
    ending_message,
)
from halfmoon_scheduling.prefill.prefill_events import (
    BlocksKept,
    DoneReported,
    HoldingsReleased,
    PrefillCancelled,
    PrefillEvent,
    PrefillFailure,
    PrefillRequested,
    PrefixFetched,
    PrefixLeased,
    RoomRefused,
    RoomReserved,
    StepFailed,
    TransfersSettled,
)
from halfmoon_scheduling.prefill.prefill_machine import PrefillMachine
from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.cluster.network_model import NetworkModel, SimTransfer
from halfmoon_simulator.cluster.sim_holdings import SimHoldings
from halfmoon_simulator.cluster.sim_kvstore import SimKvstore


@dataclass(eq=False, slots=True)
class SimPrompt:
    """One request of a prefill machine: its holdings and transfers in the modelled cluster."""

    start: StartPrefill
    holdings: SimHoldings
    fetch: SimTransfer | None = None
    landing: SimTransfer | None = None
    put: SimTransfer | None = None
    fetch_s: float = 0.0
    #: Whether `FetchPrefix` waits for blocks from a kvstore's disk.
    leasing: bool = False
    #: Whether its first pass has begun, and whether all its chunks are computed.
    begun: bool = False
    computed: bool = False
    #: `SettleTransfers` waits for the landing; `KeepBlocks` waits for the put.
    settling: bool = False
    keeping: bool = False

    @property
    def request_id(self) -> RequestId:
        """The id of this try."""
        return self.start.request_id

    @property
    def is_fetching(self) -> bool:
        """Return whether cached blocks are on their way."""
        return self.fetch is not None and not self.fetch.over


class SimPrefillEngine(Protocol):
    """Compute a shell's prompts; see `SimPrefill` and `SimLocalPrefills`."""

    def wake(self) -> None:
        """Begin a pass if none is under way and one is due."""
        ...

    def try_end_pass(self) -> None:
        """End the pass under way if it only waited for a fetch that is over or has failed."""
        ...

    def on_computed(self, prompt: SimPrompt) -> None:
        """Take note that all chunks of a prompt are computed."""
        ...

    def on_done(self, prompt: SimPrompt, n_cached: int) -> None:
        """Take note that a prompt is prefilled."""
        ...

    def on_ended(self, prompt: SimPrompt, message: ToConductor | None) -> None:
        """Forget a prompt, and answer this message if there is one."""
        ...


class SimPromptShell:
    """The prompts of one worker's prefill machine."""

    def __init__(
        self,
        worker_id: WorkerId,
        host: str,
        layout: KvLayout,
        machine: PrefillMachine,
        engine: SimPrefillEngine,
        event_queue: EventQueue,
        network: NetworkModel,
        kvstores: Callable[[WorkerId], SimKvstore | None],
        answer: Callable[[WorkerId, ToConductor], None],
        *,
        puts_after_answer: bool = False,
    ) -> None:
        """Have no prompts yet.

        Args:
            worker_id: the worker's name.
            host: where it runs.
            layout: of its KV.
            machine: decides; it belongs to this shell from now on.
            engine: computes.
            event_queue: the clock.
            network: moves bytes.
            kvstores: returns a live kvstore by name.
            answer: sends the conductor a message.
            puts_after_answer: whether new blocks are sent to the kvstore only after
                `PrefillDone`; otherwise `begin_writing` starts to send them.
        """
        self._worker_id = worker_id
        self._host = host
        self._layout = layout
        self._machine = machine
        self._engine = engine
        self._event_queue = event_queue
        self._network = network
        self._kvstores = kvstores
        self._answer = answer
        self._puts_after_answer = puts_after_answer
        self.prompts: dict[RequestId, SimPrompt] = {}

    # -- what happens to prompts -------------------------------------------------------------

    def begin(self, start: StartPrefill) -> SimPrompt:
        """Give the machine a prompt."""
        holdings = SimHoldings(self._worker_id, start, self._kvstores)
        prompt = self.prompts[start.request_id] = SimPrompt(start, holdings)
        self.post(PrefillRequested(start))
        return prompt

    def cancel(self, request_id: RequestId) -> None:
        """Give up a prompt that is here."""
        self.post(PrefillCancelled(request_id))

    def begin_writing(self, prompt: SimPrompt, landing_host: str) -> None:
        """Start to write a prompt's KV to its landing, and its new blocks to the kvstore."""
        n_blocks = self._layout.blocks_for(len(prompt.start.token_ids))
        prompt.landing = self._send(n_blocks, landing_host, lambda: self._settle(prompt))
        self._put(prompt)

    def kvstore_lost(self, kvstore: SimKvstore) -> None:
        """Fail the prompts that read from a kvstore; those that write to it do without."""
        for prompt in list(self.prompts.values()):
            if prompt.request_id not in self.prompts:
                continue  # its pass waited for one that failed here, and is over
            holdings = prompt.holdings
            if holdings.home is kvstore:
                holdings.home = None
                if prompt.put is not None:
                    self._network.cancel(prompt.put)
                    prompt.put = None
            if holdings.source is kvstore:
                if prompt.leasing:
                    holdings.source = None
                    self._on_leased(prompt, 0)
                elif prompt.is_fetching:
                    self._fail(prompt, kvstore)
                else:
                    holdings.source = None
            if prompt.keeping:
                self._keep(prompt)

    def _fail(self, prompt: SimPrompt, lost: SimKvstore) -> None:
        assert prompt.fetch is not None
        self._network.cancel(prompt.fetch)
        prompt.fetch = prompt.holdings.source = None
        reason = f"{lost.worker_id} is lost"
        failure = PrefillFailure(reason, retryable=True, culprit=lost.worker_id)
        self.post(StepFailed(prompt.request_id, failure))
        self._engine.try_end_pass()

    def crash(self) -> None:
        """Release all that the process held elsewhere: it is gone."""
        for prompt in self.prompts.values():
            self._release(prompt)
        self.prompts.clear()

    # -- the machine -------------------------------------------------------------------------

    def post(self, event: PrefillEvent) -> None:
        """Let the machine handle an event, and perform what follows from it."""
        for command in self._machine.handle(event, self._event_queue.now):
            self._perform(command)

    def _perform(self, command: PrefillCommand) -> None:
        match command:
            case FetchPrefix(request_id=request_id, n_blocks=n_blocks):
                self._fetch(self.prompts[request_id], n_blocks)
            case ReserveRoom(request_id=request_id, first_block=first):
                has_room = self.prompts[request_id].holdings.reserve(first)
                self.post(RoomReserved(request_id) if has_room else RoomRefused(request_id))
            case WakeEngine():
                self._engine.wake()
            case SettleTransfers(request_id=request_id):
                prompt = self.prompts[request_id]
                prompt.computed = prompt.settling = True
                self._engine.on_computed(prompt)
                self._settle(prompt)
            case ReportDone(request_id=request_id):
                self._report(self.prompts[request_id], command)
            case KeepBlocks(request_id=request_id):
                prompt = self.prompts[request_id]
                prompt.keeping = True
                if self._puts_after_answer:
                    self._put(prompt)
                self._keep(prompt)
            case ReleaseHoldings(request_id=request_id):
                self._release(self.prompts[request_id])
                self.post(HoldingsReleased(request_id))
            case EndRequest(request_id=request_id, ending=ending):
                message = ending_message(request_id, ending)
                self._engine.on_ended(self.prompts.pop(request_id), message)
            case StartStages() | SendChunk() | FreeSlot():
                raise AssertionError(f"{command} of a whole prompt")
            case _:
                assert_never(command)

    def _fetch(self, prompt: SimPrompt, n_blocks: int) -> None:
        prompt.leasing = True
        prompt.holdings.lease(n_blocks, lambda n_found: self._on_leased(prompt, n_found))

    def _on_leased(self, prompt: SimPrompt, n_found: int) -> None:
        """Start to read a leased prefix."""
        prompt.leasing = False
        source = prompt.holdings.source
        if source is None:
            self.post(PrefixLeased(prompt.request_id))
            return
        began_s = self._event_queue.now

        def fetched() -> None:
            prompt.fetch_s = self._event_queue.now - began_s
            self.post(PrefixFetched(prompt.request_id))
            self._engine.try_end_pass()

        n_bytes = n_found * self._layout.block_bytes
        prompt.fetch = self._network.start(source.host, self._host, n_bytes, fetched)
        cached = prompt.start.cached
        assert cached is not None, "a lease without a cached prefix"
        self.post(PrefixLeased(prompt.request_id, cached.kvstore, n_found))

    def _settle(self, prompt: SimPrompt) -> None:
        """Settle a prompt whose chunks are computed once its landing is written."""
        if not prompt.settling or (prompt.landing is not None and not prompt.landing.over):
            return
        prompt.settling = False
        prompt.holdings.release_lease()
        self.post(TransfersSettled(prompt.request_id))

    def _report(self, prompt: SimPrompt, done: ReportDone) -> None:
        self._engine.on_done(prompt, done.n_cached)
        assert done.first_token is not None, "a whole prompt is done without its first token"
        message = PrefillDone(
            request_id=done.request_id,
            first_token=done.first_token,
            finish=done.finish,
            n_cached=done.n_cached,
            queue_s=done.queue_s,
            compute_s=done.compute_s,
            drain_s=done.drain_s,
            fetched_bytes=done.n_cached * self._layout.token_bytes,
            fetch_s=prompt.fetch_s,
        )
        self._answer(self._worker_id, message)
        self.post(DoneReported(done.request_id))

    def _put(self, prompt: SimPrompt) -> None:
        holdings = prompt.holdings
        if holdings.home is not None and holdings.n_put:
            prompt.put = self._send(holdings.n_put, holdings.home.host, lambda: self._keep(prompt))

    def _send(self, n_blocks: int, host: str, done: Callable[[], None]) -> SimTransfer:
        return self._network.start(self._host, host, n_blocks * self._layout.block_bytes, done)

    def _keep(self, prompt: SimPrompt) -> None:
        """Commit a prompt's new blocks once they are written."""
        if not prompt.keeping or (prompt.put is not None and not prompt.put.over):
            return
        prompt.keeping = False
        prompt.holdings.commit()
        self.post(BlocksKept(prompt.request_id))

    def _release(self, prompt: SimPrompt) -> None:
        for transfer in (prompt.fetch, prompt.landing, prompt.put):
            if transfer is not None:
                self._network.cancel(transfer)
        prompt.settling = prompt.keeping = prompt.leasing = False
        prompt.holdings.release()
