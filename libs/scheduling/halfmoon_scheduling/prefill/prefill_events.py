"""Events of a prefill worker: what arrived, and how each performed command ended.

The shell of a prefill worker posts these to `PrefillMachine.handle`. Every command that asks for
something is answered by exactly one event, failures included, unless its request has begun to
end: then `HoldingsReleased` is the one event that the machine waits for.
"""

from collections.abc import Mapping

import msgspec

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import KvstoreAddress, StartPrefill
from halfmoon_scheduling.prefill.prompt_share import WHOLE_PROMPT, PromptShare


class PrefillFailure(msgspec.Struct, frozen=True):
    """The failure of a request, as its conductor is told."""

    reason: str
    #: Whether another try may go better.
    retryable: bool
    #: The other worker that caused the failure.
    culprit: WorkerId | None = None
    #: Whether the request itself is at fault.
    invalid: bool = False
    #: Of `halfmoon_protocol.error_codes`.
    code: str = ""


class TokenDelayed(msgspec.Struct, frozen=True):
    """A first token that is not chosen yet: the set that its grammar allows is being computed."""


#: What a pass returns for a prompt whose last chunk it computed.
FirstToken = int | TokenDelayed | PrefillFailure


class PrefillRequested(msgspec.Struct, frozen=True):
    """A valid start of a request arrived whose id is not in use here."""

    start: StartPrefill
    #: The layers to compute.
    share: PromptShare = WHOLE_PROMPT
    #: Of a share: tokens of a chunk at the most.
    chunk_tokens: int = 1
    #: At a further stage: blocks of the cached prefix, which stage 0 has leased.
    n_leased: int = 0
    #: At a further stage: slots of the next stage, all free.
    n_next_slots: int = 0
    #: At a further stage: whether stage 0 has reserved room for its layers of the new blocks.
    has_room: bool = False


class PrefillCancelled(msgspec.Struct, frozen=True):
    """The conductor gave a request up, or the connection to it was lost."""

    request_id: RequestId


class PrefixLeased(msgspec.Struct, frozen=True):
    """`FetchPrefix` has leased its blocks, and reading them has begun."""

    request_id: RequestId
    #: The kvstore that holds the lease; None: no kvstore had any of the blocks.
    source: KvstoreAddress | None = None
    #: The prompt's first blocks that need not be computed: leased, or in its landing already.
    n_blocks: int = 0
    #: Whether room was reserved at the same time; None: that was not asked for.
    has_room: bool | None = None


class PrefixFetched(msgspec.Struct, frozen=True):
    """Every layer of the leased blocks is in the request's pages."""

    request_id: RequestId


class StagesStarted(msgspec.Struct, frozen=True):
    """All further stages hold what they need for the request."""

    request_id: RequestId
    #: Slots for activations at the next stage, all free.
    n_slots: int
    #: Tokens of a chunk that fits into the slots of every stage.
    chunk_tokens: int


class ChunkArrived(msgspec.Struct, frozen=True):
    """The activations of a chunk are in a slot of this stage."""

    request_id: RequestId
    start: int
    stop: int
    slot: int


class NextSlotFreed(msgspec.Struct, frozen=True):
    """A slot of the next stage may be written to again."""

    request_id: RequestId
    slot: int


class RoomReserved(msgspec.Struct, frozen=True):
    """The home kvstore has reserved room for the request's new blocks."""

    request_id: RequestId


class RoomRefused(msgspec.Struct, frozen=True):
    """The home kvstore is full, slow or lost: the new blocks will not be kept."""

    request_id: RequestId


class PassEnded(msgspec.Struct, frozen=True):
    """The forward pass under way is over."""

    #: For each request whose last chunk was in the pass, and each whose token was delayed.
    tokens: Mapping[RequestId, FirstToken] = msgspec.field(default_factory=dict)
    #: Seconds that the pass took.
    compute_s: float = 0.0
    #: Of these, seconds in which it waited for cached layers.
    layers_wait_s: float = 0.0


class PassFailed(msgspec.Struct, frozen=True):
    """The forward pass under way raised an error: none of its requests can go on."""

    reason: str


class TransfersSettled(msgspec.Struct, frozen=True):
    """The landing has acknowledged all KV, and the fetched blocks are verified and released.

    At stage 0 of a group: the KV of all stages.
    """

    request_id: RequestId
    #: At stage 0 of a group: the token that the last stage has chosen.
    first_token: int | None = None


class DoneReported(msgspec.Struct, frozen=True):
    """The conductor was sent `PrefillDone`."""

    request_id: RequestId


class BlocksKept(msgspec.Struct, frozen=True):
    """The new blocks are committed at the home kvstore, or were given up."""

    request_id: RequestId


class KeepingStopped(msgspec.Struct, frozen=True):
    """New blocks that are not committed yet are given up: other requests want the pages.

    It changes nothing unless the request is done and its blocks are being kept.
    """

    request_id: RequestId


class StepFailed(msgspec.Struct, frozen=True):
    """A step of the request failed; the request ends with this failure."""

    request_id: RequestId
    failure: PrefillFailure


class HoldingsReleased(msgspec.Struct, frozen=True):
    """No transfer, lease or reservation of the request is left: its pages are untouched."""

    request_id: RequestId


class PagesFreed(msgspec.Struct, frozen=True):
    """Pages are free that something else than a request of the machine has held."""


PrefillEvent = (
    PrefillRequested
    | PrefillCancelled
    | StagesStarted
    | ChunkArrived
    | NextSlotFreed
    | PrefixLeased
    | PrefixFetched
    | RoomReserved
    | RoomRefused
    | PassEnded
    | PassFailed
    | TransfersSettled
    | DoneReported
    | BlocksKept
    | KeepingStopped
    | StepFailed
    | HoldingsReleased
    | PagesFreed
)
