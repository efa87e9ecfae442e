"""Define the events that the scheduling core handles, named in the past tense.

Every outcome is an event, failures included, so that a journal of events replays to the same
commands.
"""

from typing import Literal

import msgspec

from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.kv_events import KvEventBatch
from halfmoon_protocol.messages import ToConductor, WorkerInfo
from halfmoon_protocol.sampling import Sampling, Stopping

#: A role that an operator chooses for a worker; "auto": the conductor chooses again.
RequestedRole = Literal["prefill", "decode", "auto"]


class Casualty(msgspec.Struct, frozen=True):
    """A start of a worker that was lost, or hung, while it computed a request."""

    worker_id: WorkerId
    #: Counts the worker's starts: a restarted worker is another one.
    generation: int
    #: Whether it computed nothing else then: the request was tried alone.
    alone: bool = False


def with_casualty(known: tuple[Casualty, ...], more: Casualty) -> tuple[Casualty, ...]:
    """Return a request's casualties with one more: each start once, as it was last lost."""
    start = (more.worker_id, more.generation)
    return (*(c for c in known if (c.worker_id, c.generation) != start), more)


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
    #: The end of this try: `max_new_tokens` counts from here, not from the first try.
    stopping: Stopping
    #: True when the client set no limit: `max_new_tokens` is what fits the largest worker, and a
    #: smaller one may serve a part of the answer.
    open_end: bool = False
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
    #: The tenant of the request. No decision depends on it; kvstores count its blocks, and
    #: journals show it.
    tenant: str = ""
    #: The salt in `block_hashes`; passed on, no decision depends on it.
    cache_salt: str = ""
    #: In each queue, before and at prefill, the largest priority goes first.
    priority: int = 0
    #: Seconds from arrival that admission may defer it rather than refuse it; None: as the
    #: conductor's settings say.
    defer_s: float | None = None


class Event(msgspec.Struct, frozen=True, tag_field="type"):
    """The base of all events."""


class RequestArrived(Event, frozen=True, tag="request_arrived"):
    """A client has sent a request, or a further try of one begins."""

    request: Request


class RequestCancelled(Event, frozen=True, tag="request_cancelled"):
    """The client is gone, or has all it needs (a stop string)."""

    request_id: RequestId


class RequestProgressed(Event, frozen=True, tag="request_progressed"):
    """Decode has produced the first token of a try of a request with casualties.

    The request is harmless, and its casualties count no more.
    """

    request_id: RequestId


class RequestFinished(Event, frozen=True, tag="request_finished"):
    """The decode worker has produced the last token."""

    request_id: RequestId
    #: Tokens of this try, prefill's included; 0: not known.
    n_new: int = 0
    #: True when its decode worker has no room for more of an open end: a larger one goes on.
    is_cut: bool = False


class WorkerJoined(Event, frozen=True, tag="worker_joined"):
    """A worker has answered `Hello` with its record, or its record has changed."""

    worker: WorkerInfo


class WorkerLost(Event, frozen=True, tag="worker_lost"):
    """A worker's socket or lease is gone, or a message could not be sent to it."""

    worker_id: WorkerId
    reason: str


class MessageReceived(Event, frozen=True, tag="message_received"):
    """A worker has answered or published."""

    worker_id: WorkerId
    message: ToConductor


class KvChanged(Event, frozen=True, tag="kv_changed"):
    """A kvstore has published KV events."""

    worker_id: WorkerId
    batch: KvEventBatch


class RoleChangeRequested(Event, frozen=True, tag="role_change_requested"):
    """An operator has pinned a worker to a role, or released it.

    `Conductor.role_refusal` says beforehand whether the request would change nothing.
    """

    worker_id: WorkerId
    role: RequestedRole


class Tick(Event, frozen=True, tag="tick"):
    """Time has passed: deadlines are checked."""


AnyEvent = (
    RequestArrived
    | RequestCancelled
    | RequestProgressed
    | RequestFinished
    | WorkerJoined
    | WorkerLost
    | MessageReceived
    | KvChanged
    | RoleChangeRequested
    | Tick
)
