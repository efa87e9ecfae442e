"""Define the messages between the prefill workers of a group.

All of them travel between stage 0, which dials, and a further stage. What one further stage says
to another goes by way of stage 0, so a share of a prompt belongs to one connection.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from halfmoon_protocol.bounds import (
    MAX_ITEMS,
    MAX_STAGES,
    MAX_STOP_TOKENS,
    Blocks,
    Bytes,
    ErrorCode,
    Index,
    Measured,
    PositiveBytes,
    PositiveTokens,
    Priority,
    Reason,
    RequestName,
    Seconds,
    TokenId,
    TokenIds,
    Tokens,
    WorkerName,
    unit,
)
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.messages.base import Message
from halfmoon_protocol.messages.membership import Stage
from halfmoon_protocol.regions import Landing, Region
from halfmoon_protocol.sampling import Sampling
from halfmoon_protocol.trace_context import TraceContext

#: Slots for activations that one share of a prompt has at the most.
MAX_SLOTS = 64
_StageIndex = Annotated[int, Meta(ge=0, lt=MAX_STAGES), unit("index")]
_SlotIndex = Annotated[int, Meta(ge=0, lt=MAX_SLOTS), unit("index")]


class ActivationSlots(msgspec.Struct, frozen=True):
    """Memory of a stage into which the stage before it writes the activations of chunks."""

    #: The registered memory that the slots are in.
    region: Region
    #: Where each slot begins, from the region's start.
    offsets: Annotated[tuple[Bytes, ...], Meta(min_length=1, max_length=MAX_SLOTS)]
    #: Bytes of a slot: one chunk's activations fit.
    slot_bytes: PositiveBytes
    #: Bytes of one token's activations.
    token_bytes: PositiveBytes


class BlockPlaces(msgspec.Struct, frozen=True):
    """Where blocks of a prompt are, or are to be written, in the memory of a kvstore."""

    #: The kvstore's memory, as its answer to stage 0 names it.
    region: Region
    #: By their number in the prompt.
    blocks: Annotated[tuple[Index, ...], Meta(max_length=MAX_ITEMS)]
    #: Where each of them begins, from the region's start.
    offsets: Annotated[tuple[Bytes, ...], Meta(max_length=MAX_ITEMS)]


# stage 0 -> further stage


class StartShare(Message, frozen=True, tag="start_share"):
    """Compute the layers of one stage for a prompt, chunk by chunk, as activations arrive.

    Answered by `ShareReady`, and then by `ShareDone` and `ShareKept`, or by `ShareEnded`.
    """

    request_id: RequestName
    #: The stage that the receiver's record must state.
    stage: Stage
    #: Of the group's model.
    layout: KvLayout
    #: As in `StartPrefill`.
    token_ids: TokenIds
    #: As in `StartPrefill`.
    n_prompt: PositiveTokens
    #: As in `StartPrefill`; this stage writes its own layers of each page.
    landing: Landing
    #: Seconds from this message's arrival after which nothing may be written to the landing.
    landing_expires_s: Seconds
    #: For the last stage, which chooses the first token.
    sampling: Sampling
    #: The cached prefix, leased by stage 0: the prompt's first blocks.
    cached: BlockPlaces | None = None
    #: Room for new blocks, reserved by stage 0.
    room: BlockPlaces | None = None
    #: Where this stage writes its activations; None at the last stage.
    next_slots: ActivationSlots | None = None
    #: As in `StartPrefill`.
    priority: Priority = 0
    #: Seconds from this message's arrival until the first token is due; None: at no time.
    deadline_s: Seconds | None = None
    #: Parent of the worker's span; none: not traced.
    trace: TraceContext | None = None
    #: As in `StartPrefill`.
    n_held_blocks: Blocks = 0
    #: For the last stage: tokens that the first one must not be, unless nothing else may come.
    masked_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKENS)] = ()


class StopShare(Message, frozen=True, tag="stop_share"):
    """Forget a share and free all that it holds; answered by `ShareEnded`. Unknown ids are fine."""

    request_id: RequestName


# both ways


class ChunkSent(Message, frozen=True, tag="chunk_sent"):
    """The activations of a chunk are in a slot of a stage, written by the stage before it."""

    request_id: RequestName
    #: The stage whose slot it is.
    stage: _StageIndex
    #: Position of the chunk's first token.
    start: Index
    #: Position behind the chunk's last token.
    stop: Index
    #: The slot that it is in.
    slot: _SlotIndex


class SlotFreed(Message, frozen=True, tag="slot_freed"):
    """The chunk in a slot of a stage is computed: the stage before it may write there again."""

    request_id: RequestName
    #: The stage whose slot it is.
    stage: _StageIndex
    #: The slot that is free.
    slot: _SlotIndex


# further stage -> stage 0


class ShareReady(Message, frozen=True, tag="share_ready"):
    """A further stage holds pages and slots for its share of a prompt."""

    request_id: RequestName
    #: Where the stage before this one writes its activations.
    slots: ActivationSlots


class ShareProgress(Message, frozen=True, tag="share_progress"):
    """A share is still here; sent every second, so that a lost stage 0 is noticed."""

    request_id: RequestName
    #: Tokens of the prompt whose KV is there, cached ones included.
    n_tokens: Tokens


class ShareDone(Message, frozen=True, tag="share_done"):
    """The KV of the stage's layers is in the landing, acknowledged."""

    request_id: RequestName
    #: The first token, chosen by the last stage; None from the others.
    first_token: TokenId | None = None
    #: Its score, if the request asks for `logprobs`.
    score: TokenScore | None = None
    #: Scores of the client's prompt, if it asks for `prompt_logprobs`.
    prompt_scores: Annotated[tuple[TokenScore, ...], Meta(max_length=MAX_ITEMS)] = ()
    #: Seconds of forward passes, waits for fetched layers included.
    compute_s: Measured = 0.0


class ShareKept(Message, frozen=True, tag="share_kept"):
    """The stage writes nothing more for this prompt, and holds nothing more of it."""

    request_id: RequestName
    #: Whether its layers of the new blocks are in the kvstore's room, acknowledged.
    is_written: bool = False


class ShareEnded(Message, frozen=True, tag="share_ended"):
    """A share is gone by a failure or by `StopShare`, and all it held is free.

    This stage writes nothing more to the request's landing, unless `landing_in_doubt` is true.
    """

    request_id: RequestName
    #: Why; empty after `StopShare`.
    reason: Reason = ""
    #: True when another try can succeed.
    retryable: bool = True
    #: The other worker that caused the failure.
    culprit: WorkerName | None = None
    #: As in `PrefillFailed`.
    invalid: bool = False
    #: As in `PrefillFailed`: bytes of this stage may still land.
    landing_in_doubt: bool = False
    code: ErrorCode = ""
