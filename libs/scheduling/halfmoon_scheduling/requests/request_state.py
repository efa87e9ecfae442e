"""Describe one request as the conductor tracks it: its phase, its workers, its deadline.

    deferred ─▶ waiting ──▶ reserving ──▶ prefilling ──▶ decoding ──▶ over
                   ▲            │              │
                   └──refused───┘              └── given up: orphaned landing ──▶ over

With admission `lookahead` a request may be *landed* for a while, between prefilling and decoding
(see `late_admission`). A suspect may be *quarantined* before it reserves (see `quarantine`).

A request begins in the first of these phases that has something to do for it.

A request that is given up while prefill writes into its landing leaves an `OrphanedLanding`: decode
may free the pages only when prefill has stopped writing.
"""

from dataclasses import dataclass, field
from enum import Enum

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import KvstoreAddress, PrefillDone
from halfmoon_protocol.sampling import Stopping
from halfmoon_scheduling.events import Casualty, Request
from halfmoon_scheduling.fair_queueing import FairTag
from halfmoon_scheduling.placement.estimates import Placement

#: The position of a request among those that wait: negative priority, fair finish, arrival, id.
RequestRank = tuple[int, float, int, RequestId]


class Phase(Enum):
    """The step of its life that a request is in."""

    #: Admission holds it back: decode is too busy for the moment. Nothing is held anywhere.
    DEFERRED = "deferred"
    #: No decode worker has room; nothing is held anywhere.
    WAITING = "waiting"
    #: It is a suspect, and all able workers have another one; nothing is held anywhere.
    QUARANTINED = "quarantined"
    #: A decode worker was asked for pages.
    RESERVING = "reserving"
    #: Pages are held, a prefill worker computes and writes.
    PREFILLING = "prefilling"
    #: Prefill is done and its KV has landed; decode is too busy for the moment.
    LANDED = "landed"
    #: The first token is delivered, a decode worker produces the others.
    DECODING = "decoding"


#: Phases in which nothing is held at any worker.
UNPLACED = (Phase.DEFERRED, Phase.WAITING, Phase.QUARANTINED)
#: Phases in which the prefill worker is no longer needed.
PREFILLED = (Phase.LANDED, Phase.DECODING)


@dataclass(slots=True)
class RequestState:
    """A request that is not over."""

    request: Request
    #: Counts arrivals; the order of everything that is done for several requests.
    sequence: int
    arrived_s: float
    #: Its tenant's share of the queues, in tokens.
    fair: FairTag = field(default_factory=FairTag)
    #: Tokens that its tenant's share was charged with, prompt and expected answer; 0 for a retry.
    charged: int = 0
    #: Those of the answer.
    n_expected: int = 0
    #: Set by `Deadlines` alone; infinite while decoding.
    deadline_s: float = float("inf")
    phase: Phase = Phase.WAITING
    #: Set in every phase but those of `UNPLACED`, with a decode worker.
    placement: Placement | None = None
    #: When its first token is predicted; set with the placement.
    first_token_s: float = 0.0
    #: The end of its try at its decode worker; set with the placement.
    stopping: Stopping | None = None
    #: When it was placed, and how often so far.
    placed_s: float = 0.0
    n_placements: int = 0
    #: The time between tokens that admission forecast when it was placed, and that of the batch
    #: that it joined; 0 where none was predicted.
    forecast_tbt_s: float = 0.0
    joined_tbt_s: float = 0.0
    #: Whether its decode worker may share pages with it, of blocks that are there already.
    may_share_pages: bool = False
    #: Casualties that it may have caused, as of the last look.
    charges: tuple[Casualty, ...] = ()
    #: Whether its workers take nothing else until it has proved harmless.
    is_alone: bool = False
    #: When its decode worker was asked for pages.
    reserve_sent_s: float = 0.0
    #: When decode frees the pages held for it, unless it starts decoding.
    landing_ends_s: float = float("inf")
    #: The kvstore that keeps the blocks of its prompt; set in phase PREFILLING.
    store_in: KvstoreAddress | None = None
    #: The result of its prefill; set in phase LANDED.
    landed: PrefillDone | None = None
    #: When it starts decoding even if decode is too busy; set in phase LANDED.
    landed_until_s: float = float("inf")
    #: Why a decode worker last had no room for it; empty: none said so.
    refusal: str = ""
    #: Decode workers that refused it since it last waited.
    refused_by: set[WorkerId] = field(default_factory=set)
    #: Decode workers that did not answer. They are not asked again under this id: the answer
    #: to the first question would be taken for one to the second, and name freed pages.
    unresponsive: set[WorkerId] = field(default_factory=set)

    @property
    def request_id(self) -> RequestId:
        """The id of this try."""
        return self.request.request_id

    @property
    def rank(self) -> RequestRank:
        """The position among requests that wait: by priority, tenants in turn, and arrival."""
        return -self.request.priority, self.fair.finish, self.sequence, self.request_id

    @property
    def prefill(self) -> WorkerId | None:
        """The prefill worker, if it has one."""
        return self.placement.prefill if self.placement else None

    @property
    def writers(self) -> tuple[WorkerId, ...]:
        """The prefill worker and those that compute further stages with it.

        There is none when the decode worker prefills by itself.
        """
        return self.placement.chosen.workers if self.placement else ()

    @property
    def decode(self) -> WorkerId | None:
        """The decode worker, if it has one."""
        return self.placement.decode if self.placement else None

    def is_computed_at(self, worker_id: WorkerId) -> bool:
        """Return whether a worker computes this request now, as far as the core knows.

        A request in a prefill worker's queue counts, one that only has pages at a decode worker
        does not.
        """
        if self.phase is Phase.PREFILLING:
            return worker_id in (self.writers or (self.decode,))
        return self.phase is Phase.DECODING and worker_id == self.decode

    @property
    def is_suspect(self) -> bool:
        """True when workers were lost under it, and it has not proved harmless since."""
        return bool(self.charges)

    @property
    def is_placed_once(self) -> bool:
        """True when its one placement predicted its times; a retry was placed before."""
        return self.n_placements == 1 and not self.is_retry

    @property
    def is_retry(self) -> bool:
        """True when there were earlier tries: the client may have tokens already."""
        return self.request.attempt > 1
