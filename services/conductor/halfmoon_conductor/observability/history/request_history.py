"""What came of requests: to be laid beside what was predicted when they were placed."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import PrefillDone
from halfmoon_scheduling.commands import AnyCommand, Deliver, Fail, Reject, Resubmit
from halfmoon_scheduling.events import Request

TryEnd = Literal["", "finished", "cancelled", "rejected", "failed", "placed_again"]


@dataclass(slots=True)
class TryRecord:
    """One try at one request, as far as it has come."""

    arrived_s: float
    #: Tokens of the prompt, those included that an earlier try had delivered.
    n_tokens: int
    tenant: str
    priority: int
    #: Tokens of the prompt whose KV was reused, and the kvstore that they were read from.
    n_cached: int = 0
    fetched_from: WorkerId | None = None
    #: What prefill said of its stages, seconds.
    queue_s: float = 0.0
    compute_s: float = 0.0
    drain_s: float = 0.0
    fetch_s: float = 0.0
    #: From arrival to the first token, seconds; None: none was delivered.
    ttft_s: float | None = None
    #: Tokens of this try; 0 until it is over.
    n_new: int = 0
    #: Mean seconds between tokens; None before the end, and of less than two.
    tbt_s: float | None = None
    end: TryEnd = ""


@dataclass(slots=True)
class ReuseTotals:
    """Tokens of prompts that were prefilled, since the start."""

    n_prompts: int = 0
    n_tokens: int = 0
    #: Those of them that were not computed, and those of these that came over from a kvstore
    #: other than the prefill worker's own.
    n_cached: int = 0
    n_transferred: int = 0


@dataclass(slots=True)
class RequestHistory:
    """The courses of the last tries, and sums over all."""

    #: Tries that are remembered at the most.
    kept: int
    reuse: ReuseTotals = field(default_factory=ReuseTotals)
    #: Goes up whenever any of this changes: who has seen it need not look again.
    revision: int = 0
    _courses: OrderedDict[RequestId, TryRecord] = field(default_factory=OrderedDict, init=False)

    def get(self, request_id: RequestId) -> TryRecord | None:
        """One try, if it is remembered."""
        return self._courses.get(request_id)

    def arrived(self, request: Request, now: float) -> None:
        """A try begins."""
        if request.request_id in self._courses:
            return
        self.revision += 1
        self._courses[request.request_id] = TryRecord(
            now, len(request.token_ids), request.tenant, request.priority
        )
        if len(self._courses) > self.kept:
            self._courses.popitem(last=False)

    def prefilled(self, done: PrefillDone, source: WorkerId | None, n_transferred: int) -> None:
        """A prefill worker is done.

        Args:
            done: what it said.
            source: where its prefix was to be read, by the placement.
            n_transferred: tokens of it that its own kvstore did not have.
        """
        course = self._courses.get(done.request_id)
        if course is None:
            return
        self.revision += 1
        course.n_cached = done.n_cached
        course.fetched_from = (done.fetched_from or source) if done.n_cached else None
        course.queue_s, course.compute_s = done.queue_s, done.compute_s
        course.drain_s, course.fetch_s = done.drain_s, done.fetch_s
        self.reuse.n_prompts += 1
        self.reuse.n_tokens += course.n_tokens
        self.reuse.n_cached += done.n_cached
        self.reuse.n_transferred += min(n_transferred, done.n_cached)

    def ended(self, request_id: RequestId, end: TryEnd, now: float, *, n_new: int = 0) -> None:
        """A try is over; the first word of it holds."""
        course = self._courses.get(request_id)
        if course is None or course.end:
            return
        self.revision += 1
        course.end, course.n_new = end, n_new
        if course.ttft_s is not None and n_new > 1:
            course.tbt_s = (now - course.arrived_s - course.ttft_s) / (n_new - 1)

    def told(self, commands: list[AnyCommand], now: float) -> None:
        """What the core said to do."""
        for command in commands:
            match command:
                case Deliver(request_id=request_id, finish=finish):
                    if (course := self._courses.get(request_id)) is not None:
                        course.ttft_s = now - course.arrived_s
                    if finish:
                        self.ended(request_id, "finished", now, n_new=1)
                case Reject(request_id=request_id):
                    self.ended(request_id, "rejected", now)
                case Fail(request_id=request_id):
                    self.ended(request_id, "failed", now)
                case Resubmit(request_id=request_id):
                    self.ended(request_id, "placed_again", now)
                case _:
                    pass
