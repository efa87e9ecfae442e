"""What a prefill worker computes next: requests in order, cut into chunks.

Numbers only: the tokens, fetches and forward passes are the worker's. A request that waits
for cached blocks is pushed with ``ready=False`` and keeps its place while others pass it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon_protocol.ids import RequestId


class QueueFull(Exception):
    """As many requests are queued as may be; the text names the limit."""


@dataclass(frozen=True, slots=True)
class Chunk:
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
    started: bool = False


class PrefillQueue:
    """Requests first come, first served, packed into batches of a bounded number of tokens."""

    def __init__(self, *, chunk_tokens: int, max_requests: int) -> None:
        """An empty queue.

        Args:
            chunk_tokens: tokens of one batch at the most.
            max_requests: requests held at the most.

        Raises:
            ValueError: one of them is less than 1.
        """
        if chunk_tokens < 1 or max_requests < 1:
            raise ValueError(
                f"chunk_tokens is {chunk_tokens}, max_requests {max_requests}; the least is 1"
            )
        self.chunk_tokens = chunk_tokens
        self.max_requests = max_requests
        #: In order of arrival; a dict keeps it.
        self._entries: dict[RequestId, _Entry] = {}
        self._queued_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    @property
    def queued_tokens(self) -> int:
        """Tokens still to compute, of all requests here."""
        return self._queued_tokens

    def push(
        self, request_id: RequestId, *, n_tokens: int, n_cached: int, ready: bool = True
    ) -> None:
        """Queue a request at the end.

        Args:
            request_id: not here yet.
            n_tokens: all its tokens.
            n_cached: the first so many need no computing; at least one token does.
            ready: False when it must wait for `ready(request_id)`.

        Raises:
            QueueFull: `max_requests` are here.
            ValueError: it is here already, or `n_cached` leaves nothing to compute.
        """
        if request_id in self._entries:
            raise ValueError(f"request {request_id!r} is queued already")
        _require_something_to_compute(request_id, n_tokens, n_cached)
        if len(self._entries) >= self.max_requests:
            raise QueueFull(f"{self.max_requests} requests are queued, which is the limit")
        self._entries[request_id] = _Entry(n_tokens, n_cached, ready)
        self._queued_tokens += n_tokens - n_cached

    def ready(self, request_id: RequestId) -> bool:
        """Its cached blocks are at hand: it may be computed. Whether it is still here."""
        if (entry := self._entries.get(request_id)) is None:
            return False
        entry.ready = True
        return True

    def rebase(self, request_id: RequestId, n_cached: int) -> bool:
        """Another number of its tokens is cached than was thought. Whether it is still here.

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
        return True

    def remove(self, request_id: RequestId) -> bool:
        """Take a request out, wherever it is; whether it was here."""
        if (entry := self._entries.pop(request_id, None)) is None:
            return False
        self._queued_tokens -= entry.n_tokens - entry.position
        return True

    def next_batch(self) -> list[Chunk]:
        """The chunks to compute next, at most `chunk_tokens` tokens; empty when none may.

        The oldest ready request takes what it can, the following ones what is left. Changes
        nothing: until `advance`, the same answer comes again.
        """
        chunks: list[Chunk] = []
        room = self.chunk_tokens
        for request_id, entry in self._entries.items():
            if room == 0:
                break
            if not entry.ready:
                continue
            n_left = entry.n_tokens - entry.position
            n_tokens = min(n_left, room)
            chunks.append(Chunk(request_id, entry.position, n_tokens, n_tokens == n_left))
            room -= n_tokens
        return chunks

    def advance(self, chunks: Sequence[Chunk]) -> None:
        """These chunks are computed; a request whose last one is leaves the queue.

        Chunks of requests that were removed meanwhile are ignored, as are those that do not
        start where their request stands.
        """
        for chunk in chunks:
            entry = self._entries.get(chunk.request_id)
            if entry is None or entry.position != chunk.start or chunk.stop > entry.n_tokens:
                continue
            entry.position += chunk.n_tokens
            entry.started = True
            self._queued_tokens -= chunk.n_tokens
            if entry.position == entry.n_tokens:
                del self._entries[chunk.request_id]

    def check(self) -> None:
        """Audit: bounds and sums."""
        assert len(self._entries) <= self.max_requests
        for request_id, entry in self._entries.items():
            assert 0 <= entry.position < entry.n_tokens, f"{request_id} has nothing to compute"
            assert entry.ready or not entry.started, f"{request_id} ran before it was ready"
        left = sum(entry.n_tokens - entry.position for entry in self._entries.values())
        assert left == self._queued_tokens, "queued tokens are miscounted"


def _require_something_to_compute(request_id: RequestId, n_tokens: int, n_cached: int) -> None:
    if not 0 <= n_cached < n_tokens:
        raise ValueError(
            f"request {request_id!r} has {n_tokens} tokens of which {n_cached} are cached; "
            "at least one must be computed"
        )
