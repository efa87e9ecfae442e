"""Define the commands that the scheduling core returns, named in the imperative."""

from typing import Literal

import msgspec

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import ToWorker
from halfmoon_scheduling.events import Casualty


class Command(msgspec.Struct, frozen=True, tag_field="type"):
    """The base of all commands."""


class Send(Command, frozen=True, tag="send"):
    """Send a message to a worker. That it can't be sent comes back as `WorkerLost`."""

    worker_id: WorkerId
    message: ToWorker


class Deliver(Command, frozen=True, tag="deliver"):
    """Hand the first token of a try to the client."""

    request_id: RequestId
    token: int
    #: "" when more will come from decode, else "stop" or "length".
    finish: str
    #: Prompt tokens whose KV was reused.
    n_cached: int


class Reject(Command, frozen=True, tag="reject"):
    """Refuse a request that holds nothing; its client may have the tokens of earlier tries."""

    request_id: RequestId
    #: overloaded → 429, unavailable → 503, too_long and unsupported → 400.
    kind: Literal["overloaded", "unavailable", "too_long", "unsupported"]
    reason: str
    #: Seconds after which another try may succeed; 0 when none will.
    retry_after_s: float = 0.0


class Resubmit(Command, frozen=True, tag="resubmit"):
    """Start the next try of a request, with the tokens delivered so far.

    This try has ended through no fault of the request.
    """

    request_id: RequestId
    reason: str
    #: The worker that was lost, or hung, while it computed this try; the next try names it.
    casualty: Casualty | None = None
    #: False when its end says nothing about the request, which was stopped for another tenant's,
    #: or met the second worker that was lost at one moment. Then it does not count among the tries
    #: that brought no token.
    counts: bool = True


class Fail(Command, frozen=True, tag="fail"):
    """End a request with an error; another try would not help."""

    request_id: RequestId
    reason: str
    #: True when the request itself is at fault → 400; else the service is → 500.
    invalid: bool = False
    #: The worker's cause, of `halfmoon_protocol.error_codes`; empty: it named none.
    code: str = ""
    #: Workers that were lost while they computed it, one after the other, if that is the reason.
    casualties: tuple[Casualty, ...] = ()


class RefuseWorker(Command, frozen=True, tag="refuse_worker"):
    """Tell a worker that it can't be used, and hang up."""

    worker_id: WorkerId
    reason: str


AnyCommand = Send | Deliver | Reject | Resubmit | Fail | RefuseWorker
