"""Define the messages between a conductor and a decode worker."""

from typing import Annotated

import msgspec
from msgspec import Meta

from halfmoon_protocol.blocks import MAX_BLOCK_SIZE
from halfmoon_protocol.bounds import (
    Count,
    KvTransferParams,
    Measured,
    Name,
    Positive,
    RequestName,
    Salt,
    Seconds,
    TokenId,
    WorkerName,
)
from halfmoon_protocol.ids import BlockHash, RequestId
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.messages.base import Message
from halfmoon_protocol.messages.prefill import KvstoreAddress
from halfmoon_protocol.regions import Landing
from halfmoon_protocol.sampling import Finish, Sampling, Stopping
from halfmoon_protocol.trace_context import TraceContext

# conductor -> decode


class ReserveDecode(Message, frozen=True, tag="reserve_decode"):
    """Set pages aside for the KV of a prompt; answered by `DecodeReserved` or `DecodeRefused`."""

    request_id: RequestName
    #: Tokens whose KV will land; tokens delivered by an earlier try included.
    n_tokens: Positive
    #: The end of this try: its `max_new_tokens` count from behind these `n_tokens`.
    stopping: Stopping
    #: Parent of the worker's span, which lasts until the last token; none: not traced.
    trace: TraceContext | None = None
    #: Hashes of the prompt's full blocks. Only for a worker whose record says `keeps_pages`, and if
    #: all that write to the landing say `skips_held_blocks`; empty: no page of it is shared.
    block_hashes: tuple[BlockHash, ...] = ()


class AnswerChain(msgspec.Struct, frozen=True):
    """Where a chain of block hashes continues behind a prompt, and which kvstore keeps its blocks.

    The blocks that decode completes have the prompt's last tokens and the answer's.
    """

    store_in: KvstoreAddress
    #: Hash of the prompt's last full block; without one, the root of the chain.
    parent: BlockHash
    #: The prompt's tokens behind its last full block.
    tail: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_BLOCK_SIZE - 1)] = ()
    #: As in `StartPrefill`.
    tenant: Name = ""


class StartDecode(Message, frozen=True, tag="start_decode"):
    """The KV has landed and the first token is known: go on from there."""

    request_id: RequestName
    first_token: TokenId
    sampling: Sampling
    #: The end of this try, as in the reservation: it counts the tokens that are left, `first_token`
    #: included. Tokens that earlier tries delivered are subtracted already.
    stopping: Stopping
    #: Tokens of the client's prompt, behind which the client's output begins. Less than the
    #: `n_tokens` of the reservation when earlier tries delivered tokens; no limit counts from here.
    n_prompt: Positive
    #: All tokens before `first_token`; empty when sampling does not depend on them, and no server
    #: has to fetch their KV.
    history: tuple[TokenId, ...] = ()
    #: As in `PrefillDone`; empty: the KV is in the landing.
    kv_transfer_params: KvTransferParams = ""
    #: As in `StartPrefill`, beside `kv_transfer_params`.
    cache_salt: Salt = ""
    #: Only for a worker whose record says `keeps_answers`; none: no block is kept.
    answer_chain: AnswerChain | None = None


# decode -> conductor


class DecodeReserved(Message, frozen=True, tag="decode_reserved"):
    """Pages are set aside until the landing's deadline, or until `Cancel`."""

    request_id: RequestName
    landing: Landing
    #: Seconds after which the pages are given to others if decoding has not started.
    expires_s: Seconds
    #: So many blocks at the landing's beginning have their KV already, and nothing may write to
    #: their pages: other requests may read them. At least the last block of the prompt is to land.
    n_held_blocks: Count = 0


class DecodeRefused(Message, frozen=True, tag="decode_refused"):
    """No pages, or no such length: nothing is held for this request."""

    request_id: RequestName
    reason: str
    #: True when waiting may help (no free page now), false when it can't (too long).
    retryable: bool
    retry_after_s: Seconds = 1.0


class Produced(msgspec.Struct, frozen=True, array_like=True):
    """One request's part of a step."""

    request_id: RequestName
    token: TokenId
    #: "" while the request continues, else "stop" (a stop token) or "length".
    finish: Finish = ""


class TokensProduced(Message, frozen=True, tag="tokens_produced"):
    """The tokens of one decode step, of all requests of this conductor in it."""

    step: Count
    produced: tuple[Produced, ...]
    #: Scores of the tokens whose requests ask for `logprobs`.
    scores: tuple[tuple[RequestName, TokenScore], ...] = ()


class DecodeFailed(Message, frozen=True, tag="decode_failed"):
    """This request is gone from the worker and all it held is free."""

    request_id: RequestId
    reason: str
    #: True when another try can succeed (preempted, landing lost), false when it can't.
    retryable: bool
    #: True when the request itself is at fault, such as by a grammar that takes too long. Then no
    #: worker should try it again, the client gets this as its error, and `retryable` is false.
    invalid: bool = False
    #: The worker that later tries of this request are to avoid, if there is another one.
    culprit: WorkerName | None = None


class DecodeLoad(Message, frozen=True, tag="decode_load"):
    """How busy a decode worker is; published."""

    n_running: Count
    n_reserved: Count
    context_tokens: Count
    free_pages: Count
    n_pages: Count
    #: Seconds of a recent step, smoothed; 0 before the first one.
    step_s: Measured
