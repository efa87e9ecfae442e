"""Prompts that a simulated decode worker prefills by itself, in one of its steps.

    StartPrefill ─▶ lease, fetch, make room ─▶ ready ─▶ a step ─▶ PrefillDone ─▶ put

One prompt a step, in the order in which they got ready. What is fetched is there before the
step begins. `SimDecode` has the landing, and the step.
"""

from collections.abc import Callable
from dataclasses import dataclass

from halfmoon_protocol.ids import RequestId, Ticket, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import PrefillDone, PrefillFailed, StartPrefill, ToConductor
from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.cluster.network_model import NetworkModel, SimTransfer
from halfmoon_simulator.cluster.sim_kvstore import SimKvstore


@dataclass(eq=False, slots=True)
class SimLocalPrompt:
    """One of them."""

    start: StartPrefill
    n_tokens: int
    arrived_s: float
    n_cached: int = 0
    #: Where the cached prefix comes from, as long as it is leased.
    source: SimKvstore | None = None
    #: Where new blocks go, as long as room is reserved, and how many.
    home: SimKvstore | None = None
    n_put: int = 0
    fetch: SimTransfer | None = None
    put: SimTransfer | None = None
    fetch_s: float = 0.0
    began_s: float = -1.0
    answered: bool = False

    @property
    def request_id(self) -> RequestId:
        """The id of this try."""
        return self.start.request_id

    @property
    def ticket(self) -> Ticket:
        """Of its lease and its reservation."""
        return Ticket(self.start.request_id)

    @property
    def is_ready(self) -> bool:
        """Whether it waits for nothing but a step."""
        return self.began_s < 0 and (self.fetch is None or self.fetch.over)


class SimLocalPrefills:
    """Those of one decode worker."""

    def __init__(
        self,
        worker_id: WorkerId,
        host: str,
        layout: KvLayout,
        agenda: EventQueue,
        wires: NetworkModel,
        kvstores: Callable[[WorkerId], SimKvstore | None],
        n_output: Callable[[RequestId], int],
        say: Callable[[WorkerId, ToConductor], None],
        ready: Callable[[], None],
    ) -> None:
        """None yet.

        Args:
            worker_id: the decode worker.
            host: where it runs.
            layout: of its KV.
            agenda: the clock.
            wires: moves bytes.
            kvstores: a live kvstore by name.
            n_output: tokens that this try of a request will get in all.
            say: tells the conductor something.
            ready: called when a prompt waits for a step.
        """
        self._worker_id = worker_id
        self._host = host
        self._layout = layout
        self._agenda = agenda
        self._wires = wires
        self._kvstores = kvstores
        self._n_output = n_output
        self._say = say
        self._ready = ready
        #: In order of arrival; those with a put under way included.
        self._prompts: dict[RequestId, SimLocalPrompt] = {}
        #: Tokens computed and fetched so far, and prompts done.
        self.computed_tokens = 0
        self.cached_tokens = 0
        self.n_done = 0

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether it is being prefilled, or waits to be."""
        prompt = self._prompts.get(request_id)
        return prompt is not None and not prompt.answered

    # -- a prompt's way ----------------------------------------------------------------------

    def begin(self, start: StartPrefill) -> None:
        """The conductor wants a prompt to be prefilled here."""
        prompt = SimLocalPrompt(start, len(start.token_ids), self._agenda.now)
        self._prompts[prompt.request_id] = prompt
        self._fetch(prompt)
        self._make_room(prompt)
        if prompt.is_ready:
            self._ready()

    def _fetch(self, prompt: SimLocalPrompt) -> None:
        cached, size = prompt.start.cached, self._layout.block_size
        kvstore = None if cached is None else self._kvstores(cached.kvstore.worker_id)
        if cached is None or kvstore is None:
            return
        n_blocks = min(cached.n_blocks, (prompt.n_tokens - 1) // size)
        hashes = prompt.start.block_hashes[:n_blocks]
        n_found = kvstore.lease(self._worker_id, prompt.ticket, hashes) if hashes else 0
        if not n_found:
            return
        prompt.source, prompt.n_cached = kvstore, n_found * size

        def fetched() -> None:
            prompt.fetch_s = self._agenda.now - prompt.arrived_s
            self._ready()

        n_bytes = n_found * self._layout.block_bytes
        prompt.fetch = self._wires.start(kvstore.host, self._host, n_bytes, fetched)

    def _make_room(self, prompt: SimLocalPrompt) -> None:
        start = prompt.start
        home = None if start.store_in is None else self._kvstores(start.store_in.worker_id)
        first = prompt.n_cached // self._layout.block_size if home is prompt.source else 0
        hashes = start.block_hashes[first:]
        if home is None or not hashes:
            return
        parent = start.block_hashes[first - 1] if first else None
        n_put = home.reserve(self._put_owner, prompt.ticket, hashes, parent)
        if n_put is not None:
            prompt.home, prompt.n_put = home, n_put

    @property
    def _put_owner(self) -> str:
        return f"{self._worker_id} put"

    def take(self) -> SimLocalPrompt | None:
        """The prompt to compute in the next step, which begins now."""
        prompt = next((p for p in self._prompts.values() if p.is_ready), None)
        if prompt is not None:
            prompt.began_s = self._agenda.now
        return prompt

    def computed(self, prompt: SimLocalPrompt) -> None:
        """Its step is over: say so, and keep the new blocks."""
        if self._prompts.get(prompt.request_id) is not prompt:
            return  # its source was lost meanwhile
        prompt.answered = True
        self._release_source(prompt)
        self.n_done += 1
        self.computed_tokens += prompt.n_tokens - prompt.n_cached
        self.cached_tokens += prompt.n_cached
        ends = self._n_output(prompt.request_id) <= 1
        done = PrefillDone(
            request_id=prompt.request_id,
            first_token=int(ends),
            finish="stop" if ends else "",
            n_cached=prompt.n_cached,
            queue_s=prompt.began_s - prompt.arrived_s,
            compute_s=self._agenda.now - prompt.began_s,
            drain_s=0.0,
            fetched_bytes=prompt.n_cached * self._layout.token_bytes,
            fetch_s=prompt.fetch_s,
        )
        self._say(self._worker_id, done)
        if prompt.home is None or not prompt.n_put:
            self._kept(prompt)
            return
        n_bytes = prompt.n_put * self._layout.block_bytes
        host = prompt.home.host
        prompt.put = self._wires.start(self._host, host, n_bytes, lambda: self._kept(prompt))

    def _kept(self, prompt: SimLocalPrompt) -> None:
        if prompt.home is not None:
            prompt.home.commit(self._put_owner, prompt.ticket, prompt.n_put)
            prompt.home = None
        del self._prompts[prompt.request_id]

    # -- other ends --------------------------------------------------------------------------

    def cancel(self, request_id: RequestId) -> None:
        """Forget a prompt that is not done; what is done is kept all the same."""
        if request_id in self:
            self._let_go(self._prompts.pop(request_id))

    def source_lost(self, kvstore: SimKvstore) -> None:
        """A kvstore is gone: who reads from it fails, who writes to it does without."""
        for prompt in list(self._prompts.values()):
            if prompt.home is kvstore:
                prompt.home = None
                if prompt.put is not None:
                    self._wires.cancel(prompt.put)
                    self._kept(prompt)
            if prompt.source is kvstore:
                prompt.source = None
                if prompt.fetch is not None and not prompt.fetch.over:
                    self._let_go(self._prompts.pop(prompt.request_id))
                    failed = PrefillFailed(
                        request_id=prompt.request_id,
                        reason=f"{kvstore.worker_id} is lost",
                        retryable=True,
                        culprit=kvstore.worker_id,
                    )
                    self._say(self._worker_id, failed)

    def crash(self) -> None:
        """The process is gone, and with it all that it held elsewhere."""
        for prompt in self._prompts.values():
            self._let_go(prompt)
        self._prompts.clear()

    def _let_go(self, prompt: SimLocalPrompt) -> None:
        for transfer in (prompt.fetch, prompt.put):
            if transfer is not None:
                self._wires.cancel(transfer)
        self._release_source(prompt)
        if prompt.home is not None:
            prompt.home.revoke(self._put_owner, prompt.ticket)
            prompt.home = None

    def _release_source(self, prompt: SimLocalPrompt) -> None:
        if prompt.source is not None:
            prompt.source.release(self._worker_id, prompt.ticket)
            prompt.source = None
