"""Commands of the prefill machine: what the shell of a prefill worker is to do.

Each names the event that the shell posts when it is done. `StepFailed` may take the place of any
of them but `HoldingsReleased`.
"""

import msgspec

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import PrefillFailed, PrefillStopped, PrefillTimes
from halfmoon_protocol.sampling import Finish
from halfmoon_scheduling.prefill.prefill_events import PrefillFailure
from halfmoon_scheduling.prefill.prefill_queue import PrefillChunk
from halfmoon_scheduling.prefill.prompt_share import PromptShare


class FetchPrefix(msgspec.Struct, frozen=True):
    """Use these pages for the request's KV; lease its cached prefix and start to read it.

    Outcome: `PrefixLeased`, at once when `n_blocks` is 0. A leased prefix is followed by
    `PrefixFetched`.
    """

    request_id: RequestId
    #: Pages of the pool, one for each block of the prompt; empty where the KV is computed in
    #: place.
    pages: tuple[int, ...]
    #: Blocks to have at the most: those in the landing already, then leased ones.
    n_blocks: int
    #: Reserve room at the home kvstore from this block on at the same time, and say so in
    #: `PrefixLeased`; None: `ReserveRoom` follows, if there is a home.
    reserve_from: int | None = None


class ReserveRoom(msgspec.Struct, frozen=True):
    """Reserve room at the home kvstore for the prompt's blocks from `first_block` on.

    A reservation that `FetchPrefix` has made is given back first.
    Outcome: `RoomReserved` or `RoomRefused`.
    """

    request_id: RequestId
    first_block: int


class StartStages(msgspec.Struct, frozen=True):
    """Start the shares of a prompt at the further stages of the group.

    Outcome: `StagesStarted`.
    """

    request_id: RequestId


class SendChunk(msgspec.Struct, frozen=True):
    """Write a chunk's activations into a slot of the next stage, and say so. Has no outcome.

    Chunks of a request are announced in the order of these commands.
    """

    request_id: RequestId
    start: int
    stop: int
    slot: int


class FreeSlot(msgspec.Struct, frozen=True):
    """Tell the stage before that it may write to a slot of this one again. Has no outcome."""

    request_id: RequestId
    slot: int


class WakeEngine(msgspec.Struct, frozen=True):
    """Ask for `PrefillMachine.next_pass` if no forward pass is under way. Has no outcome."""


class StagePass(msgspec.Struct, frozen=True):
    """The layers that a pass runs, and the slots of its chunk's activations."""

    share: PromptShare
    #: Slot of this stage that has the activations; None at stage 0.
    incoming: int | None
    #: Slot of the next stage that they are for; None at the last stage.
    outgoing: int | None


class PrefillPass(msgspec.Struct, frozen=True):
    """Run one forward pass over these chunks. Given out by `PrefillMachine.next_pass`.

    Outcome: `PassEnded` or `PassFailed`.
    """

    chunks: tuple[PrefillChunk, ...]
    #: Requests whose first tokens earlier passes have left to be chosen.
    delayed: tuple[RequestId, ...] = ()
    #: Of the one chunk, if its request is computed in stages.
    stage: StagePass | None = None


class SettleTransfers(msgspec.Struct, frozen=True):
    """Wait until the landing has acknowledged all KV; verify fetched blocks.

    Outcome: `TransfersSettled`. From then on the lease of fetched blocks may end.
    """

    request_id: RequestId


class ReportDone(msgspec.Struct, frozen=True):
    """Send the conductor `PrefillDone`, or stage 0 `ShareDone`. Outcome: `DoneReported`."""

    request_id: RequestId
    #: None at a further stage that is not the last one.
    first_token: int | None
    finish: Finish
    n_cached: int
    #: Seconds from the request's arrival to its first pass.
    queue_s: float
    #: Seconds of the passes that the request was in.
    compute_s: float
    #: Seconds from its first token to `TransfersSettled`.
    drain_s: float
    times: PrefillTimes


class KeepBlocks(msgspec.Struct, frozen=True):
    """Commit the new blocks at the home kvstore once they are written. Outcome: `BlocksKept`."""

    request_id: RequestId


class ReleaseHoldings(msgspec.Struct, frozen=True):
    """Stop what is done for a request; end its transfers, its lease and its reservation.

    Outcome: `HoldingsReleased`. No other event of the request has to follow.
    """

    request_id: RequestId


class PrefillStop(msgspec.Struct, frozen=True):
    """The ending of a request that was cancelled."""


#: How a request ended; None: `PrefillDone` was sent and nothing happened since.
PrefillEnding = PrefillFailure | PrefillStop | None


class EndRequest(msgspec.Struct, frozen=True):
    """Forget a request; tell its conductor of an ending that is no success. Has no outcome."""

    request_id: RequestId
    ending: PrefillEnding


PrefillCommand = (
    FetchPrefix
    | ReserveRoom
    | StartStages
    | SendChunk
    | FreeSlot
    | WakeEngine
    | SettleTransfers
    | ReportDone
    | KeepBlocks
    | ReleaseHoldings
    | EndRequest
)


def ending_message(
    request_id: RequestId, ending: PrefillEnding, *, landing_in_doubt: bool = False
) -> PrefillFailed | PrefillStopped | None:
    """Return what a conductor is told of an ending; None where `PrefillDone` has said it."""
    if ending is None:
        return None
    if isinstance(ending, PrefillStop):
        return PrefillStopped(request_id=request_id, landing_in_doubt=landing_in_doubt)
    return PrefillFailed(
        request_id=request_id,
        reason=ending.reason,
        retryable=ending.retryable,
        culprit=ending.culprit,
        invalid=ending.invalid,
        landing_in_doubt=landing_in_doubt,
        code=ending.code,
    )
