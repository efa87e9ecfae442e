"""Define the messages between a conductor and a prefill worker."""

from typing import Annotated

import msgspec
from msgspec import Meta

from halfmoon_protocol.bounds import (
    MAX_ITEMS,
    MAX_REPLICAS,
    MAX_STAGES,
    Address,
    Blocks,
    Bytes,
    Count,
    ErrorCode,
    Hashes,
    KeyId,
    KvTransferParams,
    Measured,
    Name,
    Pages,
    PositiveTokens,
    Priority,
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
from halfmoon_protocol.regions import Landing
from halfmoon_protocol.sampling import Finish, Sampling, Stopping
from halfmoon_protocol.trace_context import TraceContext

# conductor -> prefill


class KvstoreAddress(msgspec.Struct, frozen=True, omit_defaults=True):
    """A kvstore as a prefill worker reaches it."""

    worker_id: WorkerName
    #: Its record's: a restarted kvstore is another one.
    generation: Count
    #: ZeroMQ endpoint of its ROUTER.
    commands: Address
    #: `WorkerInfo.key_id` of its record.
    key_id: KeyId = ""


class StageAddress(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prefill worker of a group as the others of the group reach it."""

    worker_id: WorkerName
    #: Its record's: a restarted worker is another one.
    generation: Count
    #: ZeroMQ endpoint of its ROUTER.
    commands: Address
    #: `WorkerInfo.key_id` of its record.
    key_id: KeyId = ""


class CachedPrefix(msgspec.Struct, frozen=True):
    """The first `n_blocks` blocks of a prompt are at this kvstore, as far as is known."""

    #: The kvstore to read first.
    kvstore: KvstoreAddress
    #: Blocks of the prefix.
    n_blocks: Blocks
    #: Further kvstores that hold as many, nearest first: read when `kvstore` fails.
    replicas: Annotated[tuple[KvstoreAddress, ...], Meta(max_length=MAX_REPLICAS)] = ()


class StartPrefill(Message, frozen=True, tag="start_prefill"):
    """Compute the KV of these tokens, write it to the landing, choose the next token."""

    request_id: RequestName
    #: Everything before the token to choose; tokens delivered by an earlier try included.
    token_ids: TokenIds
    #: Tokens of the client's prompt: the first so many of `token_ids`. The same in every try; no
    #: limit counts from here.
    n_prompt: PositiveTokens
    #: Hashes of the full blocks of `token_ids`.
    block_hashes: Hashes
    #: Where the KV is written.
    landing: Landing
    #: Seconds from this message's arrival after which nothing may be written to the landing.
    landing_expires_s: Seconds
    #: How the next token is chosen.
    sampling: Sampling
    #: The end of this try: its `max_new_tokens` count from behind `token_ids`, the first token
    #: included. Tokens that earlier tries delivered are subtracted already.
    stopping: Stopping
    #: Blocks that may be read instead of computed; none: none are known.
    cached: CachedPrefix | None = None
    #: The kvstore that keeps the blocks for reuse; none when no kvstore is live.
    store_in: KvstoreAddress | None = None
    #: The tenant of the request; passed on to the kvstore that keeps the blocks.
    tenant: Name = ""
    #: The stages after this one, in order, when a group is to compute the prompt. Only for a worker
    #: whose record says that it is stage 0 of a group; it answers for all stages.
    stages: Annotated[tuple[StageAddress, ...], Meta(max_length=MAX_STAGES)] = ()
    #: The largest priority in the queue goes first. The worker decides how others are kept from
    #: starving.
    priority: Priority = 0
    #: Seconds from this message's arrival until the first token is due: what is left of the limit
    #: of its time to first token; none: there is no limit. A worker may order its queue by it.
    deadline_s: Seconds | None = None
    #: Parent of the worker's span; none: not traced.
    trace: TraceContext | None = None
    #: The salt in `block_hashes`, for a server that hashes the blocks by itself; empty: none.
    cache_salt: Salt = ""
    #: So many blocks at the landing's beginning have their KV already: nothing is written to their
    #: pages. Only for a worker whose record says `skips_held_blocks`.
    n_held_blocks: Blocks = 0


# prefill -> conductor


class PrefillTimes(msgspec.Struct, frozen=True):
    """What a request waited for at its prefill worker, from the command's arrival to the answer,
    by the worker's clock: each moment is in one of these, so they add up to the whole."""

    #: Waiting for pages, for its first forward, and between its chunks for those of others.
    queue_s: Measured
    #: Waiting for kvstores: for answers, and in forward passes for cached layers under way.
    fetch_s: Measured
    #: Forward passes with this request, without those waits.
    compute_s: Measured
    #: Waiting for the last bytes: from the end of the last forward until all are acknowledged and
    #: verified.
    transfer_s: Measured


class PrefillDone(Message, frozen=True, tag="prefill_done"):
    """All KV is in the landing, acknowledged, and the first token is chosen."""

    request_id: RequestName
    #: The token that follows `token_ids`.
    first_token: TokenId
    #: "" when the request continues, else "stop" or "length": then no decode is needed.
    finish: Finish
    #: Tokens whose KV was fetched, or held, rather than computed; fewer than there are `token_ids`.
    n_cached: Tokens
    #: Seconds from the command's arrival to the first forward.
    queue_s: Measured
    #: Seconds of forward passes, waits for fetched layers included.
    compute_s: Measured
    #: Seconds from the last forward's end until all bytes were acknowledged.
    drain_s: Measured
    #: Bytes that were fetched from a kvstore.
    fetched_bytes: Bytes = 0
    #: Seconds until the last of them had arrived.
    fetch_s: Measured = 0.0
    #: The kvstore that they came from; none: the first one named, or nothing was fetched.
    fetched_from: WorkerName | None = None
    #: Score of the first token, if the request asks for `logprobs`.
    score: TokenScore | None = None
    #: Scores of the client's prompt from its second token on, if it asks for `prompt_logprobs`.
    prompt_scores: Annotated[tuple[TokenScore, ...], Meta(max_length=MAX_ITEMS)] = ()
    #: Times of all parts, for metrics alone; no decision depends on them.
    times: PrefillTimes | None = None
    #: How a decode server fetches the KV from this prefill server, which has no landing to write
    #: to. The decode worker gets it in `StartDecode`.
    kv_transfer_params: KvTransferParams = ""


class PrefillFailed(Message, frozen=True, tag="prefill_failed"):
    """This request is gone from the worker, and all it held is free.

    Nothing more will be written to its landing, unless `landing_in_doubt` is true.
    """

    request_id: RequestName
    #: Why, for people.
    reason: Reason
    #: True when another try can succeed.
    retryable: bool
    #: The worker that could not be reached, if that was the cause.
    culprit: WorkerName | None = None
    #: True when the request itself is at fault, such as by a grammar that takes too long. Then no
    #: worker should try it again, the client gets this as its error, and `retryable` is false.
    invalid: bool = False
    #: True when bytes may still land: the landing's owner did not confirm the end of writes that
    #: were given up, or a further stage of the group could not be asked to stop.
    landing_in_doubt: bool = False
    code: ErrorCode = ""


class PrefillStopped(Message, frozen=True, tag="prefill_stopped"):
    """The answer to `Cancel`: nothing more will be written to this request's landing.

    So its pages may be given to others, unless `landing_in_doubt` is true.
    """

    request_id: RequestName
    #: True when bytes may still land: the landing's owner did not confirm the end of writes that
    #: were given up, or a further stage of the group could not be asked to stop.
    landing_in_doubt: bool = False


class PrefillLoad(Message, frozen=True, tag="prefill_load"):
    """How busy a prefill worker is; published."""

    #: Requests that wait for their first forward.
    n_queued: Requests
    #: Tokens still to compute, of running and queued requests.
    queued_tokens: Tokens
    #: Pages without a holder.
    free_pages: Pages
    #: Pages of the pool.
    n_pages: Pages
