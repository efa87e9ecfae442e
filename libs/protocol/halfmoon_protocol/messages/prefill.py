"""Between a conductor and a prefill worker."""

from typing import Annotated

import msgspec
from msgspec import Meta

from halfmoon_protocol.bounds import (
    MAX_REPLICAS,
    MAX_STAGES,
    Address,
    Count,
    Measured,
    Name,
    Positive,
    RequestName,
    Seconds,
    TokenId,
    WorkerName,
)
from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.messages.base import Message
from halfmoon_protocol.regions import Landing
from halfmoon_protocol.sampling import Finish, Sampling, Stopping
from halfmoon_protocol.trace_context import TraceContext

# conductor -> prefill


class KvstoreAddress(msgspec.Struct, frozen=True):
    """A kvstore as a prefill worker reaches it."""

    worker_id: WorkerName
    generation: Count
    commands: Address


class StageAddress(msgspec.Struct, frozen=True):
    """A prefill worker of a group as the others of the group reach it."""

    worker_id: WorkerName
    generation: Count
    commands: Address


class CachedPrefix(msgspec.Struct, frozen=True):
    """The first `n_blocks` blocks of a prompt are at this kvstore, as far as is known."""

    kvstore: KvstoreAddress
    n_blocks: Count
    #: Further kvstores that hold as many, nearest first: for a reader whom `kvstore` fails.
    replicas: Annotated[tuple[KvstoreAddress, ...], Meta(max_length=MAX_REPLICAS)] = ()


class StartPrefill(Message, frozen=True, tag="start_prefill"):
    """Compute the KV of these tokens, write it to the landing, choose the next token."""

    request_id: RequestName
    #: Everything before the token to choose; tokens delivered by an earlier try included.
    token_ids: tuple[TokenId, ...]
    #: Tokens of the client's prompt: the first so many of `token_ids`. The same in every try; no
    #: limit counts from here.
    n_prompt: Positive
    #: Hashes of the full blocks of `token_ids`.
    block_hashes: tuple[BlockHash, ...]
    landing: Landing
    #: Seconds from this message's arrival after which nothing may be written to the landing.
    landing_expires_s: Seconds
    sampling: Sampling
    #: Of this try: its `max_new_tokens` count from behind `token_ids`, the first token included.
    #: What earlier tries delivered is taken off already.
    stopping: Stopping
    cached: CachedPrefix | None = None
    #: Where to keep the blocks for reuse; none when no kvstore is there.
    store_in: KvstoreAddress | None = None
    #: Who asks; told to the kvstore that keeps the blocks.
    tenant: Name = ""
    #: The stages after this one, in order, when a group is to compute it. Only for a worker
    #: whose record says that it is stage 0 of one; it answers for all of them.
    stages: Annotated[tuple[StageAddress, ...], Meta(max_length=MAX_STAGES)] = ()
    #: Of those that are queued the largest goes first; how it is kept from starving the others
    #: is the worker's to say.
    priority: Annotated[int, Meta(ge=-(2**40), le=2**40)] = 0
    #: Whose child the worker's span is; none: not traced.
    trace: TraceContext | None = None


# prefill -> conductor


class PrefillTimes(msgspec.Struct, frozen=True):
    """What a request waited for at its prefill worker, from the command's arrival to the answer,
    by the worker's clock: each moment is in one of these, so they add up to the whole."""

    #: Its turn: for pages, for its first forward, and between its chunks for those of others.
    queue_s: Measured
    #: Kvstores: for their answers, and in forward passes for cached layers that were not there.
    fetch_s: Measured
    #: Forward passes that it was in, without those waits.
    compute_s: Measured
    #: The last bytes: from its last forward's end until all were acknowledged and verified.
    transfer_s: Measured


class PrefillDone(Message, frozen=True, tag="prefill_done"):
    """All KV is in the landing, acknowledged, and the first token is chosen."""

    request_id: RequestName
    first_token: TokenId
    #: "" when it goes on, else "stop" or "length": then no decode is needed.
    finish: Finish
    #: Tokens whose KV was fetched rather than computed.
    n_cached: Count
    #: Seconds from the command's arrival to the first forward.
    queue_s: Measured
    #: Seconds of forward passes, waits for fetched layers included.
    compute_s: Measured
    #: Seconds from the last forward's end until all bytes were acknowledged.
    drain_s: Measured
    #: Bytes fetched from a kvstore, and the seconds until the last one was there.
    fetched_bytes: Count = 0
    fetch_s: Measured = 0.0
    #: Where they came from; none: from the kvstore that was named first, or nothing came.
    fetched_from: WorkerName | None = None
    #: The first token's, if the request asks for `logprobs`.
    score: TokenScore | None = None
    #: Of the client's prompt from its second token on, if it asks for `prompt_logprobs`.
    prompt_scores: tuple[TokenScore, ...] = ()
    #: Where the time went, for people to see; nothing is decided by it.
    times: PrefillTimes | None = None


class PrefillFailed(Message, frozen=True, tag="prefill_failed"):
    """This request is gone from the worker, all it held is free, and nothing more will be
    written to its landing."""

    request_id: RequestId
    reason: str
    #: True when another try can succeed.
    retryable: bool
    #: The worker that could not be reached, if that was the cause.
    culprit: WorkerId | None = None
    #: True when the request itself is at fault, such as a grammar that takes too much: no worker
    #: should try it again, and its client is told so. `retryable` is false then.
    invalid: bool = False


class PrefillStopped(Message, frozen=True, tag="prefill_stopped"):
    """The answer to `Cancel`: nothing more will be written to this request's landing, so
    its pages may be given to others."""

    request_id: RequestName


class PrefillLoad(Message, frozen=True, tag="prefill_load"):
    """How busy a prefill worker is; published."""

    n_queued: Count
    #: Tokens still to compute, of running and queued requests.
    queued_tokens: Count
    free_pages: Count
    n_pages: Count
