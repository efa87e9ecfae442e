"""Define the messages between a conductor and a decode worker."""

from typing import Annotated

import msgspec
from msgspec import Meta

from halfmoon_protocol.blocks import MAX_BLOCK_SIZE
from halfmoon_protocol.bounds import (
    MAX_ITEMS,
    Blocks,
    ErrorCode,
    HashBytes,
    Hashes,
    Index,
    KvTransferParams,
    Measured,
    Name,
    Pages,
    PositiveTokens,
    Reason,
    RequestName,
    Requests,
    Salt,
    Seconds,
    TokenId,
    TokenIds,
    Tokens,
    WorkerName,
)
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
    n_tokens: PositiveTokens
    #: The end of this try: its `max_new_tokens` count from behind these `n_tokens`, the first
    #: token included. Tokens that earlier tries delivered are subtracted already.
    stopping: Stopping
    #: Parent of the worker's span, which lasts until the last token; none: not traced.
    trace: TraceContext | None = None
    #: Hashes of the prompt's full blocks. Only for a worker whose record says `keeps_pages`, and if
    #: all that write to the landing say `skips_held_blocks`; empty: no page of it is shared.
    block_hashes: Hashes = ()


class AnswerChain(msgspec.Struct, frozen=True):
    """Where a chain of block hashes continues behind a prompt, and which kvstore keeps its blocks.

    The blocks that decode completes have the prompt's last tokens and the answer's.
    """

    #: The kvstore that keeps the blocks.
    store_in: KvstoreAddress
    #: Hash of the prompt's last full block; without one, the root of the chain.
    parent: HashBytes
    #: The prompt's tokens behind its last full block.
    tail: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_BLOCK_SIZE - 1)] = ()
    #: As in `StartPrefill`.
    tenant: Name = ""


class StartDecode(Message, frozen=True, tag="start_decode"):
    """The KV has landed and the first token is known: go on from there."""

    request_id: RequestName
    #: The token that prefill chose; the client has it already.
    first_token: TokenId
    #: How the further tokens are chosen.
    sampling: Sampling
    #: Tokens of the client's prompt, behind which the client's output begins. Less than the
    #: `n_tokens` of the reservation when earlier tries delivered tokens; no limit counts from here.
    n_prompt: PositiveTokens
    #: All tokens before `first_token`; empty when sampling does not depend on them, and no server
    #: has to fetch their KV.
    history: TokenIds = ()
    #: As in `PrefillDone`; empty: the KV is in the landing.
    kv_transfer_params: KvTransferParams = ""
    #: As in `StartPrefill`, beside `kv_transfer_params`.
    cache_salt: Salt = ""
    #: Only for a worker whose record says `keeps_answers`; none: no block is kept.
    answer_chain: AnswerChain | None = None
    #: For workers of before this protocol had features, whose record has none: the `stopping` of
    #: the reservation once more. Others get none: the reservation says it.
    stopping: Stopping | None = None


# decode -> conductor


class DecodeReserved(Message, frozen=True, tag="decode_reserved"):
    """Pages are set aside until the landing's deadline, or until `Cancel`."""

    request_id: RequestName
    #: Where prefill writes the KV.
    landing: Landing
    #: Seconds, from this answer's sending, after which the pages are given to others if decoding
    #: has not started.
    expires_s: Seconds
    #: So many blocks at the landing's beginning have their KV already, and nothing may write to
    #: their pages: other requests may read them. At least the last block of the prompt is to land.
    n_held_blocks: Blocks = 0


class DecodeRefused(Message, frozen=True, tag="decode_refused"):
    """No pages, or no such length: nothing is held for this request."""

    request_id: RequestName
    #: Why, for people.
    reason: Reason
    #: True when another try can succeed, here later or at another worker (no free page now,
    #: draining); false when none can (too long).
    retryable: bool
    #: Seconds after which room is likely, if it is retryable.
    retry_after_s: Seconds = 1.0
    code: ErrorCode = ""


class Produced(msgspec.Struct, frozen=True, array_like=True):
    """One request's part of a step."""

    #: The try that the token belongs to.
    request_id: RequestName
    #: The token that was chosen.
    token: TokenId
    #: "" while the request continues, else "stop" (a stop token) or "length".
    finish: Finish = ""


_Scored = tuple[
    Annotated[RequestName, Meta(title="request_id")], Annotated[TokenScore, Meta(title="score")]
]


class TokensProduced(Message, frozen=True, tag="tokens_produced"):
    """The tokens of one decode step, of all requests of this conductor in it."""

    #: Rises with each message to a conductor; 0: not numbered.
    step: Index
    #: One token of each request.
    produced: Annotated[tuple[Produced, ...], Meta(max_length=MAX_ITEMS)]
    #: Scores of the tokens whose requests ask for `logprobs`.
    scores: Annotated[tuple[_Scored, ...], Meta(max_length=MAX_ITEMS)] = ()


class DecodeFailed(Message, frozen=True, tag="decode_failed"):
    """This request is gone from the worker and all it held is free."""

    request_id: RequestName
    #: Why, for people.
    reason: Reason
    #: True when another try can succeed (preempted, landing lost), false when it can't.
    retryable: bool
    #: True when the request itself is at fault, such as by a grammar that takes too long. Then no
    #: worker should try it again, the client gets this as its error, and `retryable` is false.
    invalid: bool = False
    #: The worker that later tries of this request are to avoid, if there is another one.
    culprit: WorkerName | None = None
    code: ErrorCode = ""


class DecodeLoad(Message, frozen=True, tag="decode_load"):
    """How busy a decode worker is; published."""

    #: Requests in the next step.
    n_running: Requests
    #: Reservations that are not started yet.
    n_reserved: Requests
    #: Tokens that the next step attends to, over all its requests.
    context_tokens: Tokens
    #: Pages for further requests, those that kept KV would give up included.
    free_pages: Pages
    #: Pages of the pool.
    n_pages: Pages
    #: Seconds of a recent step, smoothed; 0 before the first one.
    step_s: Measured
