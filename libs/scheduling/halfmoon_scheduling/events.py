"""What can happen to the scheduling core: facts, in the past tense.

Every outcome comes as one of these, failures included, so that a journal of events replays to
the same commands.
"""

import msgspec

from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.kv_events import KvEventBatch
from halfmoon_protocol.messages import ToConductor, WorkerInfo
from halfmoon_protocol.sampling import Sampling, Stopping


class Casualty(msgspec.Struct, frozen=True):
    """A worker's start that was lost, or hung, while it computed a request."""

    worker_id: WorkerId
    #: Which start of it: one that is started again is another worker.
    generation: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One try at one client's request."""

    request_id: RequestId
    #: The prompt, then the tokens that earlier tries delivered.
    token_ids: tuple[int, ...]
    #: Tokens of the client's prompt: the first so many of `token_ids`.
    n_prompt: int
    #: Hashes of the full blocks of `token_ids`.
    block_hashes: tuple[BlockHash, ...]
    sampling: Sampling
    #: What is still to come: `max_new_tokens` counts from here, not from the first try.
    stopping: Stopping
    #: 1 for the first try.
    attempt: int = 1
    #: How many tries in a row before this one brought the client no token.
    fruitless: int = 0
    #: Workers lost under earlier tries since a try last got a token from decode; each once.
    casualties: tuple[Casualty, ...] = ()
    #: Latest acceptable predicted time to first token, seconds; None: no limit.
    ttft_slo_s: float | None = None
    #: Largest acceptable predicted time between tokens, seconds; None: no limit.
    tbt_slo_s: float | None = None
    #: Who asks. No decision looks at it; kvstores count its blocks, and journals show it.
    tenant: str = ""
    #: Among those that wait, are held back, or are queued for prefill the largest goes first.
    priority: int = 0
    #: Seconds from arrival that admission may hold it back rather than refuse it; None: as
    #: the conductor's settings say.
    defer_s: float | None = None


class Event(msgspec.Struct, frozen=True, tag_field="type"):
    """The base of all events."""


class RequestArrived(Event, frozen=True, tag="request_arrived"):
    """A client asked, or a request is to be placed again."""

    request: Request


class RequestCancelled(Event, frozen=True, tag="request_cancelled"):
    """The client is gone, or has what it wanted (a stop string)."""

    request_id: RequestId


class RequestProgressed(Event, frozen=True, tag="request_progressed"):
    """Decode produced the first token of a try at a request with casualties: it is harmless,
    and they count no more."""

    request_id: RequestId


class RequestFinished(Event, frozen=True, tag="request_finished"):
    """The decode worker produced the last token."""

    request_id: RequestId
    #: Tokens of this try, prefill's included; 0: not known.
    n_new: int = 0


class WorkerJoined(Event, frozen=True, tag="worker_joined"):
    """A worker welcomed us; or it did before, and its record changed."""

    worker: WorkerInfo


class WorkerLost(Event, frozen=True, tag="worker_lost"):
    """A worker's socket or lease is gone, or a message could not be sent to it."""

    worker_id: WorkerId
    reason: str


class MessageReceived(Event, frozen=True, tag="message_received"):
    """A worker answered or published."""

    worker_id: WorkerId
    message: ToConductor


class KvChanged(Event, frozen=True, tag="kv_changed"):
    """A kvstore published KV events."""

    worker_id: WorkerId
    batch: KvEventBatch


class Tick(Event, frozen=True, tag="tick"):
    """Time passed: deadlines are looked at."""


AnyEvent = (
    RequestArrived
    | RequestCancelled
    | RequestProgressed
    | RequestFinished
    | WorkerJoined
    | WorkerLost
    | MessageReceived
    | KvChanged
    | Tick
)
