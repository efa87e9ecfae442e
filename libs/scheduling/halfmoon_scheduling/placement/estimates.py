"""Describe a request, its candidate workers, the predicted times, and the choice among them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.messages import PrefillCost


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The properties of a request that placement depends on."""

    request_id: RequestId
    n_tokens: int
    #: Pages that decode must have free: those of the prompt's KV and one to grow into.
    n_pages: int
    block_size: int
    block_bytes: int
    #: Chained hashes of the prompt's full blocks: each one identifies all tokens up to its end.
    block_hashes: tuple[BlockHash, ...] = ()
    #: The largest goes first in a prefill queue.
    priority: int = 0
    #: The decode worker that may have pages of its prefix; None: none is known.
    pages_at: WorkerId | None = None

    @property
    def max_cached_blocks(self) -> int:
        """Whole blocks that may come from a cache: at least one token is computed."""
        return (self.n_tokens - 1) // self.block_size


# These are structs because they are made five times as fast as frozen dataclasses. An exhaustive
# placement makes one of each kind for every worker.


class PrefillCandidate(msgspec.Struct, frozen=True, gc=False):
    """A prefill worker that could take the request."""

    worker_id: WorkerId
    cost: PrefillCost
    #: The live kvstore that keeps this worker's blocks; None without one.
    home: WorkerId | None
    #: Predicted seconds until the worker would start the request.
    queue_s: float


class DecodeCandidate(msgspec.Struct, frozen=True, gc=False):
    """A decode worker that could take the request, with its reservations counted."""

    worker_id: WorkerId
    n_requests: int
    free_pages: int
    #: Predicted seconds of a step with one more request, without that request's tokens.
    step_s: float
    #: Seconds that each token of the request's context adds to a step.
    per_token_s: float


class Estimate(msgspec.Struct, frozen=True, gc=False):
    """The predicted times of one prefill worker: a row of the table that explains a choice."""

    worker_id: WorkerId
    home: WorkerId | None
    #: Prefix blocks that the home kvstore holds.
    local_blocks: int
    #: The kvstore that the cached prefix would come from; None with 0 blocks.
    source: WorkerId | None
    #: Blocks of the cached prefix.
    n_blocks: int
    #: Blocks of the cached prefix that the home kvstore does not hold.
    transfer_blocks: int
    queue_s: float
    transfer_s: float
    prefill_s: float
    #: Predicted seconds to the first token: queue, transfer and prefill.
    ttft_s: float

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """All prefill workers that compute and write; the first one receives `StartPrefill`."""
        return (self.worker_id,)

    @property
    def pool_worker(self) -> WorkerId:
        """The prefill worker whose unloaded time an SLO multiple refers to."""
        return self.worker_id


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen workers, and the estimates that they were chosen from."""

    #: The chosen row of `estimates`.
    chosen: Estimate
    #: The decode worker; None when none has room now.
    decode: WorkerId | None
    #: Predicted seconds between tokens at `decode`, this request included; 0 without one.
    tbt_s: float
    #: Rows of prefill workers, in order of their ids; then of groups, and of decode workers that
    #: could prefill the request itself. The best of all of them, and each one that was preferred.
    estimates: tuple[Estimate, ...]
    #: The worker that the placement mode preferred before it compared estimates, whether or
    #: not that worker was chosen; None in modes without a preference.
    preferred: WorkerId | None = None
    #: Prefill workers of servers that have no room to decode the request now.
    without_room: frozenset[WorkerId] = frozenset()
    #: Candidates without a row: the choice is better than each of them.
    n_more: int = 0
    #: Blocks of the longest prefix that a candidate holds at home, or would use.
    known_blocks: int = field(default=0, compare=False)

    @property
    def n_candidates(self) -> int:
        """All candidates, with or without a row."""
        return len(self.estimates) + self.n_more

    @property
    def prefill(self) -> WorkerId:
        """The prefill worker."""
        return self.chosen.worker_id

    @property
    def ttft_s(self) -> float:
        """Predicted seconds to the first token."""
        return self.chosen.ttft_s


def most_known(rows: Iterable[Estimate]) -> int:
    """Return the blocks of the longest prefix that a row's worker holds at home, or would use."""
    return max(max(row.n_blocks, row.local_blocks) for row in rows)
