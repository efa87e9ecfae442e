"""Between a conductor and a prefill worker."""

import msgspec

from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.messages.base import Message
from halfmoon_protocol.regions import Landing
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_protocol.scores import TokenScore
from halfmoon_protocol.traces import TraceContext

# conductor -> prefill


class KvstoreAddress(msgspec.Struct, frozen=True):
    """A kvstore as a prefill worker reaches it."""

    worker_id: WorkerId
    generation: int
    commands: str


class StageAddress(msgspec.Struct, frozen=True):
    """A prefill worker of a group as the others of the group reach it."""

    worker_id: WorkerId
    generation: int
    commands: str


class CachedPrefix(msgspec.Struct, frozen=True):
    """The first `n_blocks` blocks of a prompt are at this kvstore, as far as is known."""

    kvstore: KvstoreAddress
    n_blocks: int
    #: Further kvstores that hold as many, nearest first: for a reader whom `kvstore` fails.
    replicas: tuple[KvstoreAddress, ...] = ()


class StartPrefill(Message, frozen=True, tag="start_prefill"):
    """Compute the KV of these tokens, write it to the landing, choose the next token."""

    request_id: RequestId
    #: Everything before the token to choose; tokens delivered by an earlier try included.
    token_ids: tuple[int, ...]
    #: Tokens of the client's prompt: the first so many of `token_ids`.
    n_prompt: int
    #: Hashes of the full blocks of `token_ids`.
    block_hashes: tuple[BlockHash, ...]
    landing: Landing
    #: Seconds from this message's arrival after which nothing may be written to the landing.
    landing_expires_s: float
    sampling: Sampling
    stopping: Stopping
    cached: CachedPrefix | None = None
    #: Where to keep the blocks for reuse; none when no kvstore is there.
    store_in: KvstoreAddress | None = None
    #: Who asks; told to the kvstore that keeps the blocks.
    tenant: str = ""
    #: The stages after this one, in order, when a group is to compute it. Only for a worker
    #: whose record says that it is stage 0 of one; it answers for all of them.
    stages: tuple[StageAddress, ...] = ()
    #: Of those that are queued the largest goes first; how it is kept from starving the others
    #: is the worker's to say.
    priority: int = 0
    #: Whose child the worker's span is; none: not traced.
    trace: TraceContext | None = None


# prefill -> conductor


class PrefillTimes(msgspec.Struct, frozen=True):
    """What a request waited for at its prefill worker, from the command's arrival to the answer,
    by the worker's clock: each moment is in one of these, so they add up to the whole."""

    #: Its turn: for pages, for its first forward, and between its chunks for those of others.
    queue_s: float
    #: Kvstores: for their answers, and in forward passes for cached layers that were not there.
    fetch_s: float
    #: Forward passes that it was in, without those waits.
    compute_s: float
    #: The last bytes: from its last forward's end until all were acknowledged and verified.
    transfer_s: float


class PrefillDone(Message, frozen=True, tag="prefill_done"):
    """All KV is in the landing, acknowledged, and the first token is chosen."""

    request_id: RequestId
    first_token: int
    #: "" when it goes on, else "stop" or "length": then no decode is needed.
    finish: str
    #: Tokens whose KV was fetched rather than computed.
    n_cached: int
    #: Seconds from the command's arrival to the first forward.
    queue_s: float
    #: Seconds of forward passes, waits for fetched layers included.
    compute_s: float
    #: Seconds from the last forward's end until all bytes were acknowledged.
    drain_s: float
    #: Bytes fetched from a kvstore, and the seconds until the last one was there.
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    #: Where they came from; none: from the kvstore that was named first, or nothing came.
    fetched_from: WorkerId | None = None
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

    request_id: RequestId


class PrefillLoad(Message, frozen=True, tag="prefill_load"):
    """How busy a prefill worker is; published."""

    n_queued: int
    #: Tokens still to compute, of running and queued requests.
    queued_tokens: int
    free_pages: int
    n_pages: int
