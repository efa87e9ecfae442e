"""Put the blocks that a simulated decode worker completes into kvstores, as live workers do.

What an answer says is not modelled. The next turn of a session begins with prompt and answer, and
its block ids name them. So an answer is put where its session goes on, and by the ids of that turn.
The blocks of one answer are put one run after another. Limits of queues are not modelled.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from halfmoon_protocol.ids import BlockHash, RequestId, Ticket, WorkerId
from halfmoon_protocol.messages import StartDecode
from halfmoon_simulator.cluster.network_model import NetworkModel, SimTransfer
from halfmoon_simulator.cluster.sim_kvstore import SimKvstore


@dataclass(eq=False, slots=True)
class _SimAnswer:
    """One request that runs, or that has ended with blocks to put."""

    request_id: RequestId
    store_in: WorkerId
    #: Blocks of prompt and answer, and the first of them that decode completes.
    hashes: tuple[BlockHash, ...]
    first: int
    #: Complete blocks to put, by their number.
    waiting: list[int] = field(default_factory=list)
    #: The put under way: its kvstore, its ticket, its blocks and its bytes.
    home: SimKvstore | None = None
    ticket: Ticket | None = None
    n_put: int = 0
    transfer: SimTransfer | None = None
    #: Whether a block was lost: later ones would not be found.
    is_cut: bool = False


class SimAnswers:
    """The answers of one worker's requests."""

    def __init__(
        self,
        worker_id: WorkerId,
        host: str,
        block_bytes: int,
        network: NetworkModel,
        kvstores: Callable[[WorkerId], SimKvstore | None],
        chain_of: Callable[[RequestId], tuple[BlockHash, ...]],
    ) -> None:
        """Follow no request.

        Args:
            worker_id: the worker's name.
            host: where it runs.
            block_bytes: of the KV of a block.
            network: moves bytes.
            kvstores: returns a live kvstore by name.
            chain_of: returns the blocks of a request's prompt and answer; empty: not known.
        """
        self._owner = f"{worker_id} answers"
        self._host = host
        self._block_bytes = block_bytes
        self._network = network
        self._kvstores = kvstores
        self._chain_of = chain_of
        self._running: dict[RequestId, _SimAnswer] = {}
        #: Answers with a put under way.
        self._putting: dict[_SimAnswer, None] = {}

    @property
    def is_idle(self) -> bool:
        """Return whether no put is under way."""
        return not self._putting

    def start(self, start: StartDecode, first_block: int) -> None:
        """Follow a request whose first block to complete is this one, if it is to be kept."""
        if (chain := start.answer_chain) is None:
            return
        if hashes := self._chain_of(start.request_id):
            store_in = chain.store_in.worker_id
            answer = _SimAnswer(start.request_id, store_in, hashes, first_block)
            self._running[start.request_id] = answer

    def on_block(self, request_id: RequestId, block: int) -> None:
        """Put a block of which all KV is computed now."""
        answer = self._running.get(request_id)
        if answer is None or not answer.first <= block < len(answer.hashes) or answer.is_cut:
            return
        answer.waiting.append(block)
        self._begin_put(answer)

    def end(self, request_id: RequestId) -> None:
        """Follow a request no longer; its complete blocks are still put."""
        self._running.pop(request_id, None)

    def kvstore_lost(self, kvstore: SimKvstore) -> None:
        """Give up what was on its way to a lost kvstore."""
        for answer in [each for each in self._putting if each.home is kvstore]:
            self._stop(answer)

    def crash(self) -> None:
        """Give up all puts: the process is gone."""
        for answer in list(self._putting):
            home, ticket = answer.home, answer.ticket
            self._stop(answer)
            if home is not None and ticket is not None:
                home.revoke(self._owner, ticket)
        self._running.clear()

    def _begin_put(self, answer: _SimAnswer) -> None:
        if answer.home is not None or not answer.waiting:
            return
        home = self._kvstores(answer.store_in)
        first, after = answer.waiting[0], answer.waiting[-1] + 1
        answer.waiting.clear()
        parent = answer.hashes[first - 1] if first else None
        if home is None or (parent is not None and not home.n_first([parent])):
            answer.is_cut = True
            return
        ticket = Ticket(f"{answer.request_id} {first}")
        n_put = home.reserve(self._owner, ticket, answer.hashes[first:after], parent)
        if n_put is None:
            answer.is_cut = True
            return
        answer.home, answer.ticket, answer.n_put = home, ticket, n_put
        self._putting[answer] = None
        n_bytes = n_put * self._block_bytes
        answer.transfer = self._network.start(
            self._host, home.host, n_bytes, lambda: self._on_written(answer)
        )

    def _on_written(self, answer: _SimAnswer) -> None:
        home, ticket = answer.home, answer.ticket
        assert home is not None and ticket is not None, "a put ended that was given up"
        answer.home = answer.transfer = None
        del self._putting[answer]
        home.commit(self._owner, ticket, answer.n_put)
        self._begin_put(answer)

    def _stop(self, answer: _SimAnswer) -> None:
        if answer.transfer is not None:
            self._network.cancel(answer.transfer)
        answer.home = answer.transfer = None
        answer.is_cut = True
        answer.waiting.clear()
        del self._putting[answer]

    def check(self) -> None:
        """Audit: a put has a kvstore and a transfer, and blocks wait only behind a put."""
        for answer in self._putting:
            assert answer.home is not None and answer.transfer is not None
        for answer in self._running.values():
            assert answer in self._putting or not answer.waiting
