"""Order requests and cut them into chunks: choose what a prefill worker computes next.

Numbers only: the tokens, fetches and forward passes are the worker's. A request that waits
for cached blocks is pushed with ``ready=False`` and keeps its place while others pass it.

A pass has few tokens when several requests share it: each of them has its first token when the
pass ends. A long prompt whose turn it is has a pass to itself, of more tokens. Its chunks stay
short while a request that goes before it gets ready. A share of a prompt, one stage's layers, has a
pass to itself for each chunk, and no further than its activations and slots allow. After each of
its chunks, prompts of the same priority that end within one pass go before it: they would wait for
all of a long prompt, and cost it one pass.

The largest priority goes first, then what the queue's order says (`queue_order`), then tenants in
turn, by the tokens that they have had computed (`fair_queueing`). A request that is partly computed
pauses between two passes for one that goes before it. No request starves: once later requests of
larger priority have overtaken it by more than so many tokens, it goes before all others. Among
equal priorities the order itself starves none.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfmoon_protocol.ids import RequestId
from halfmoon_scheduling.fair_queueing import BURST_TOKENS, FairRoom, FairShares, FairTag
from halfmoon_scheduling.prefill.long_chunks import LongChunks
from halfmoon_scheduling.prefill.queue_order import QUEUE_ORDERS, QueueOrder

#: Passes' worth of tokens that a request lets later ones of larger priority compute before it.
OVERTAKEN_PASSES = 32
#: Negated priority, when the start is due, the fair finish, and a count of arrivals.
_Rank = tuple[float, float, float, int]
#: Rank before every priority: of requests that were overtaken for long enough.
_LONG_OVERTAKEN = float("-inf")


class QueueFull(Exception):
    """As many requests are queued as may be, and their tenant has its share; names the limit."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A run of one request's tokens to compute in one forward pass."""

    request_id: RequestId
    #: Index of the first token; the KV of all before it is there.
    start: int
    n_tokens: int
    #: Whether the request's tokens end with it: the next token is then chosen.
    last: bool

    @property
    def stop(self) -> int:
        """Index after the last token."""
        return self.start + self.n_tokens


@dataclass(slots=True)
class _Entry:
    n_tokens: int
    #: Tokens before this one are cached or computed. Always less than `n_tokens`.
    position: int
    ready: bool
    arrived_s: float
    deadline_s: float | None
    tenant: str
    #: Its tenant's share of the queue, in tokens.
    fair: FairTag
    #: Its place.
    rank: _Rank
    #: Whether its chunks may exceed `chunk_tokens`.
    may_be_long: bool = True
    #: Tokens before this one may be computed now, by a pass of its own; None: all, with others.
    allowed: int | None = None
    started: bool = False
    #: Tokens computed for later ones since it came, because their priority is larger.
    overtaken_tokens: int = 0


class PrefillQueue:
    """Requests by priority and a chosen order, cut and packed into batches of bounded size."""

    def __init__(
        self,
        *,
        chunk_tokens: int,
        max_requests: int,
        long_chunks: LongChunks | None = None,
        order: QueueOrder = QUEUE_ORDERS["arrival"],
    ) -> None:
        """Create an empty queue.

        Args:
            chunk_tokens: tokens at the most of a batch that several requests share.
            max_requests: requests held at the most, but for tenants with less than their share.
            long_chunks: bounds the chunk of a request alone in its batch, and predicts its
                seconds; None: `chunk_tokens`, and none are predicted.
            order: of requests of equal priority.

        Raises:
            ValueError: one of them is less than 1.
        """
        if chunk_tokens < 1 or max_requests < 1:
            raise ValueError(
                f"chunk_tokens is {chunk_tokens}, max_requests {max_requests}; the least is 1"
            )
        self.chunk_tokens = chunk_tokens
        self.max_requests = max_requests
        self._long_chunks = long_chunks
        self._in_order_of = order
        #: In order of arrival; a dict keeps it.
        self._entries: dict[RequestId, _Entry] = {}
        #: In the order of their turns: ranks of exactly `_entries`, sorted.
        self._order: list[tuple[_Rank, RequestId]] = []
        self._max_overtaken_tokens = OVERTAKEN_PASSES * chunk_tokens
        self._fair_shares, self._fair_room = FairShares(BURST_TOKENS), FairRoom()
        self._n_pushed = 0
        self._queued_tokens = 0
        #: Whether the latest chunk that was computed was one of a share.
        self._share_was_last = False

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    @property
    def queued_tokens(self) -> int:
        """Tokens still to compute, of all requests here."""
        return self._queued_tokens

    def in_order(self) -> Iterator[RequestId]:
        """Iterate over all requests in the order of their turns; change nothing meanwhile."""
        return (request_id for _, request_id in self._order)

    def push(
        self,
        request_id: RequestId,
        *,
        n_tokens: int,
        n_cached: int,
        ready: bool = True,
        priority: int = 0,
        may_be_long: bool = True,
        arrived_s: float = 0.0,
        deadline_s: float | None = None,
        is_share: bool = False,
        tenant: str = "",
    ) -> None:
        """Queue a request at its place among those of its priority.

        Args:
            request_id: not here yet.
            n_tokens: all its tokens.
            n_cached: the first so many need no computing; at least one token does.
            ready: False when it must wait for `ready(request_id)`.
            priority: the largest goes first.
            may_be_long: whether its chunks may have more than `chunk_tokens` tokens.
            arrived_s: now, on a clock that never goes back.
            deadline_s: when its first token is due, on the same clock; None: at no time.
            is_share: whether its passes have nothing else, and compute what `allow` allows.
            tenant: its tenant, of which none gets more than its share while others wait.

        Raises:
            QueueFull: `max_requests` are here, and its tenant has its share of them.
            ValueError: it is here already, or `n_cached` leaves nothing to compute.
        """
        if request_id in self._entries:
            raise ValueError(f"request {request_id!r} is queued already")
        _require_something_to_compute(request_id, n_tokens, n_cached)
        self._fair_room.enter(tenant)
        is_full = len(self._entries) >= self.max_requests
        if is_full and not self._fair_room.is_within_share(tenant, self.max_requests):
            self._fair_room.leave(tenant)
            raise QueueFull(f"{self.max_requests} requests are queued, which is the limit")
        self._n_pushed += 1
        fair = self._fair_shares.tag(tenant, n_tokens - n_cached)
        rank = (float(-priority), 0.0, fair.finish, self._n_pushed)
        entry = _Entry(n_tokens, n_cached, ready, arrived_s, deadline_s, tenant, fair, rank)
        entry.may_be_long = may_be_long
        entry.allowed = 0 if is_share else None
        self._entries[request_id] = entry
        self._enter(request_id, entry, float(-priority))
        self._queued_tokens += n_tokens - n_cached

    def ready(self, request_id: RequestId) -> bool:
        """Let a request be computed; return whether it is still here."""
        if (entry := self._entries.get(request_id)) is None:
            return False
        entry.ready = True
        return True

    def allow(self, request_id: RequestId, stop: int) -> bool:
        """Let a share be computed up to this token; return whether it is still here."""
        if (entry := self._entries.get(request_id)) is None:
            return False
        assert entry.allowed is not None, f"{request_id!r} is no share"
        entry.allowed = min(stop, entry.n_tokens)
        return True

    def rebase(self, request_id: RequestId, n_cached: int) -> bool:
        """Correct how many tokens of a request are cached; return whether it is still here.

        Raises:
            ValueError: some of it is computed already, or nothing would be left to compute.
        """
        if (entry := self._entries.get(request_id)) is None:
            return False
        if entry.started:
            raise ValueError(f"request {request_id!r} is partly computed, up to {entry.position}")
        _require_something_to_compute(request_id, entry.n_tokens, n_cached)
        self._queued_tokens += entry.position - n_cached
        entry.position = n_cached
        self._leave(request_id, entry)
        self._enter(request_id, entry, entry.rank[0])
        return True

    def remove(self, request_id: RequestId) -> bool:
        """Take a request out, wherever it is; return whether it was here."""
        if (entry := self._entries.pop(request_id, None)) is None:
            return False
        self._leave(request_id, entry)
        self._fair_room.leave(entry.tenant)
        self._queued_tokens -= entry.n_tokens - entry.position
        return True

    def next_batch(self) -> list[PrefillChunk]:
        """Return the chunks to compute next, perhaps none.

        The first ready request takes what it can, the following ones what is left of
        `chunk_tokens`. Changes nothing: until `advance` or `push`, the same answer comes again.
        """
        chunks: list[PrefillChunk] = []
        room = self.chunk_tokens
        for place, (rank, request_id) in enumerate(self._order):
            if room <= 0:
                break
            entry = self._entries[request_id]
            if not entry.ready:
                continue
            if entry.allowed is not None:
                if entry.allowed <= entry.position:
                    continue
                if chunks:
                    break
                if self._share_was_last and (short := self._short_ones(rank[0])):
                    return short
                n_tokens, last = entry.allowed - entry.position, entry.allowed == entry.n_tokens
                return [PrefillChunk(request_id, entry.position, n_tokens, last)]
            n_left = entry.n_tokens - entry.position
            n_tokens = min(n_left, room if place else self._most_alone(entry))
            chunks.append(PrefillChunk(request_id, entry.position, n_tokens, n_tokens == n_left))
            room -= n_tokens
        return chunks

    def _short_ones(self, priority: float) -> list[PrefillChunk]:
        """Return a batch of whole rests of prompts that may go before a share's next chunk.

        Args:
            priority: of the share, negated; `_LONG_OVERTAKEN` if it was overtaken for long enough.
        """
        chunks: list[PrefillChunk] = []
        room = self.chunk_tokens
        for rank, request_id in self._order:
            entry = self._entries[request_id]
            n_left = entry.n_tokens - entry.position
            if rank[0] > priority or room <= 0:
                break
            if entry.ready and entry.allowed is None and n_left <= room:
                chunks.append(PrefillChunk(request_id, entry.position, n_left, True))
                room -= n_left
        return chunks

    def _most_alone(self, entry: _Entry) -> int:
        """Return the most tokens of a request whose turn is before all others'."""
        if self._long_chunks is None or not entry.may_be_long:
            return self.chunk_tokens
        return max(self.chunk_tokens, self._long_chunks.tokens_from(entry.position))

    def observe_pass(self, chunks: Sequence[PrefillChunk], seconds: float) -> None:
        """Learn how long a pass over these chunks took, waits for cached layers not counted."""
        if self._long_chunks is not None and chunks:
            self._long_chunks.observe([(chunk.start, chunk.stop) for chunk in chunks], seconds)

    def advance(self, chunks: Sequence[PrefillChunk]) -> None:
        """Take note that chunks are computed; a request leaves the queue with its last one.

        Chunks of requests that were removed meanwhile are ignored, as are those that do not
        start where their request stands.
        """
        for chunk in chunks:
            entry = self._entries.get(chunk.request_id)
            if entry is None or entry.position != chunk.start or chunk.stop > entry.n_tokens:
                continue
            entry.position += chunk.n_tokens
            entry.started = True
            self._fair_shares.on_served(entry.fair)
            self._share_was_last = entry.allowed is not None
            self._queued_tokens -= chunk.n_tokens
            self._count_overtaken(entry, chunk.n_tokens)
            if entry.position == entry.n_tokens:
                self.remove(chunk.request_id)

    def _count_overtaken(self, winner: _Entry, n_tokens: int) -> None:
        """Count tokens of `winner` for all that came earlier and have a smaller priority."""
        for request_id, entry in self._entries.items():
            if entry is winner:
                return
            if entry.rank[0] <= winner.rank[0]:
                continue
            entry.overtaken_tokens += n_tokens
            if entry.overtaken_tokens >= self._max_overtaken_tokens:
                self._leave(request_id, entry)
                self._enter(request_id, entry, _LONG_OVERTAKEN)

    def _enter(self, request_id: RequestId, entry: _Entry, first: float) -> None:
        """Put it into the order; `first` is its negated priority, or `_LONG_OVERTAKEN`."""
        due_s = 0.0
        if first != _LONG_OVERTAKEN:
            rest_s = 0.0
            if self._long_chunks is not None:
                rest_s = self._long_chunks.predict_s(entry.position, entry.n_tokens)
            due_s = self._in_order_of.start_due_s(entry.arrived_s, entry.deadline_s, rest_s)
        entry.rank = (first, due_s, entry.fair.finish, entry.rank[3])
        insort(self._order, (entry.rank, request_id))

    def _leave(self, request_id: RequestId, entry: _Entry) -> None:
        """Take it out of the order."""
        del self._order[bisect_left(self._order, (entry.rank, request_id))]

    def check(self) -> None:
        """Audit: bounds and sums."""
        assert len(self._entries) <= 2 * self.max_requests
        for request_id, entry in self._entries.items():
            assert 0 <= entry.position < entry.n_tokens, f"{request_id} has nothing to compute"
            assert entry.ready or not entry.started, f"{request_id} ran before it was ready"
        assert self._order == sorted((e.rank, r) for r, e in self._entries.items())
        left = sum(entry.n_tokens - entry.position for entry in self._entries.values())
        assert left == self._queued_tokens, "queued tokens are miscounted"


def _require_something_to_compute(request_id: RequestId, n_tokens: int, n_cached: int) -> None:
    if not 0 <= n_cached < n_tokens:
        raise ValueError(
            f"request {request_id!r} has {n_tokens} tokens of which {n_cached} are cached; "
            "at least one must be computed"
        )
