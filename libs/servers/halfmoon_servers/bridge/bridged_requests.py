"""Track the requests of one bridged server, from the reservation to the last token.

    reserved ──start_prefill──▶ prefilling ──first token──▶ prefilled ──start_decode──▶ decoding
       └───────────────────────── cancelled, failed, finished: gone ─────────────────────────┘

The server computes a request from the first command on, and streams its tokens. Those behind the
first one are kept until `start_decode` has come. This is bookkeeping without tasks and sockets.
"""

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from halfmoon_protocol.ids import BlockHash, RequestId
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.sampling import Finish, Stopping


class BridgedPhase(Enum):
    """The step of its life at this server that a request is in."""

    RESERVED = "reserved"
    PREFILLING = "prefilling"
    PREFILLED = "prefilled"
    DECODING = "decoding"


class AdmissionRefusal(NamedTuple):
    """State why a server gets no further request."""

    reason: str
    #: True when waiting may help.
    retryable: bool


#: A token, its score if the request asks for one, and why the request ended with it.
TokenRow = tuple[int, TokenScore | None, Finish]


@dataclass(slots=True)
class BridgedRequest:
    """One request at one server."""

    request_id: RequestId
    #: Tokens of the prompt; those that earlier tries delivered are part of it.
    n_tokens: int
    n_pages: int
    #: When the reservation ends unless the prefill has started.
    expires_s: float
    phase: BridgedPhase = BridgedPhase.RESERVED
    started_s: float = 0.0
    #: Leading tokens that the index says the server has.
    n_cached: int = 0
    #: The prompt, the tokens so far, and the hashes of the prompt's blocks.
    token_ids: list[int] = field(default_factory=list)
    block_hashes: tuple[BlockHash, ...] = ()
    cache_salt: str = ""
    #: Of the reservation, or else of the prefill.
    stopping: Stopping | None = None
    n_produced: int = 0
    #: When its last token came.
    token_s: float = 0.0
    #: Tokens that came before `start_decode`.
    kept: list[TokenRow] = field(default_factory=list)


class BridgedRequests:
    """The requests at one server, and the pages of its cache that they claim."""

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self._n_blocks = n_blocks
        self._block_size = block_size
        self._requests: dict[RequestId, BridgedRequest] = {}
        #: Pages in use when the server was last asked, and the requests that had started then.
        self._n_used = 0
        self._counted: set[RequestId] = set()
        #: Set while there is no request.
        self.idle = asyncio.Event()
        self.idle.set()
        #: Smoothed seconds between two tokens of a request; 0 before there were any.
        self.step_s = 0.0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._requests

    def get(self, request_id: RequestId) -> BridgedRequest | None:
        """Return a request that is here."""
        return self._requests.get(request_id)

    def all(self) -> list[BridgedRequest]:
        """Return all requests, in the order of their reservations."""
        return list(self._requests.values())

    def count(self, *phases: BridgedPhase) -> int:
        """Count the requests in these phases."""
        return sum(request.phase in phases for request in self._requests.values())

    @property
    def context_tokens(self) -> int:
        """Tokens of the requests that decode."""
        return sum(
            request.n_tokens + request.n_produced
            for request in self._requests.values()
            if request.phase is BridgedPhase.DECODING
        )

    @property
    def queued_tokens(self) -> int:
        """Tokens to compute of the requests that have no first token yet."""
        return sum(
            request.n_tokens - request.n_cached
            for request in self._requests.values()
            if request.phase is BridgedPhase.PREFILLING
        )

    @property
    def free_pages(self) -> int:
        """Pages that no request uses, as the server said last, less what was claimed since.

        The server counts a prefix that several requests share once, so it may have more room than
        the sum of their pages says.
        """
        claimed = sum(
            request.n_pages
            for request in self._requests.values()
            if request.request_id not in self._counted
        )
        return max(0, self._n_blocks - self._n_used - claimed)

    def refusal(self, n_tokens: int, max_new_tokens: int, limit: int) -> AdmissionRefusal | None:
        """Return why a request is not admitted; None: it is.

        Args:
            n_tokens: tokens of the prompt.
            max_new_tokens: tokens that it may add.
            limit: the longest context of the server; 0: unknown.
        """
        n_pages = self.pages_for(n_tokens)
        if limit and n_tokens + max_new_tokens > limit:
            reason = f"{n_tokens} tokens and {max_new_tokens} new ones; its context is {limit}"
            return AdmissionRefusal(reason, retryable=False)
        if n_pages > self._n_blocks:
            reason = f"{n_tokens} tokens need {n_pages} pages; it has {self._n_blocks}"
            return AdmissionRefusal(reason, retryable=False)
        # Alone, a request gets its turn whatever the last count was.
        if self._requests and n_pages > self.free_pages:
            reason = f"{n_pages} pages wanted, {self.free_pages} of {self._n_blocks} free"
            return AdmissionRefusal(reason, retryable=True)
        return None

    def pages_for(self, n_tokens: int) -> int:
        """Return the pages of so many tokens."""
        return -(-n_tokens // self._block_size)

    def add(
        self,
        request_id: RequestId,
        n_tokens: int,
        expires_s: float,
        stopping: Stopping | None = None,
    ) -> BridgedRequest:
        """Add a request that has a reservation."""
        assert request_id not in self._requests, "an id names one request"
        request = BridgedRequest(request_id, n_tokens, self.pages_for(n_tokens), expires_s)
        request.stopping = stopping
        self._requests[request_id] = request
        self.idle.clear()
        return request

    def remove(self, request_id: RequestId) -> BridgedRequest | None:
        """Remove a request that is over."""
        self._counted.discard(request_id)
        removed = self._requests.pop(request_id, None)
        if not self._requests:
            self.idle.set()
        return removed

    def expired(self, now: float) -> list[BridgedRequest]:
        """Return the reservations whose prefill did not start in time."""
        return [
            request
            for request in self._requests.values()
            if request.phase is BridgedPhase.RESERVED and request.expires_s <= now
        ]

    def on_token(self, request: BridgedRequest, row: TokenRow, now: float) -> None:
        """Count a token that the server has produced."""
        if request.n_produced:
            gap_s = now - request.token_s
            self.step_s += (gap_s - self.step_s) * (0.05 if self.step_s else 1.0)
        request.token_s = now
        request.n_produced += 1
        request.token_ids.append(row[0])

    def on_load(self, kv_usage: float) -> None:
        """Take over the used share of the cache, as the server says."""
        self._n_used = min(self._n_blocks, max(0, round(kv_usage * self._n_blocks)))
        # A request with a token is in that count, at least with its prompt.
        self._counted = {
            request.request_id for request in self._requests.values() if request.n_produced
        }

    def check(self) -> None:
        """Check that ids agree, and that only requests before `start_decode` keep tokens."""
        assert self._counted <= self._requests.keys()
        for request_id, request in self._requests.items():
            assert request.request_id == request_id
            assert not request.kept or request.phase is BridgedPhase.PREFILLED
