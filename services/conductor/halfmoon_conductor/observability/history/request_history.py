"""Record the outcome of requests, for comparison with the predictions at their placement."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from halfmoon_conductor.observability.history.activity_history import ActivityHistory
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import PrefillDone
from halfmoon_scheduling.commands import AnyCommand, Deliver, Fail, Reject, Resubmit
from halfmoon_scheduling.events import Request

TryEnd = Literal["finished", "cancelled", "rejected", "failed", "placed_again"]


@dataclass(slots=True)
class TryRecord:
    """One try of one request, as far as it has come."""

    arrived_s: float
    #: Tokens of the prompt, with those that an earlier try had delivered.
    n_tokens: int
    tenant: str
    priority: int
    #: Tokens of the prompt whose KV was reused, and the kvstore that it was read from.
    n_cached: int = 0
    fetched_from: WorkerId | None = None
    #: Seconds of prefill's stages, as it reported them.
    queue_s: float = 0.0
    compute_s: float = 0.0
    drain_s: float = 0.0
    fetch_s: float = 0.0
    #: Seconds from arrival to the first token; None: none was delivered.
    ttft_s: float | None = None
    #: Tokens of this try; 0 until it is over.
    n_new: int = 0
    #: Mean seconds between tokens; None before the end, and with fewer than two tokens.
    tbt_s: float | None = None
    end: TryEnd | Literal[""] = ""


@dataclass(slots=True)
class ReuseTotals:
    """Totals over the prompts that were prefilled since the start."""

    n_prompts: int = 0
    n_tokens: int = 0
    #: Tokens that were not computed, and tokens of these that a kvstore other than the prefill
    #: worker's own sent.
    n_cached: int = 0
    n_transferred: int = 0


@dataclass(slots=True)
class RequestHistory:
    """Keep the records of the last tries, totals over all, and counts by second."""

    #: Most tries that are kept.
    kept: int
    reuse: ReuseTotals = field(default_factory=ReuseTotals)
    activity: ActivityHistory = field(default_factory=ActivityHistory)
    #: Increases with every change, so that readers can skip unchanged data.
    revision: int = 0
    _tries: OrderedDict[RequestId, TryRecord] = field(default_factory=OrderedDict, init=False)

    def get(self, request_id: RequestId) -> TryRecord | None:
        """Return the record of a try, if it is kept."""
        return self._tries.get(request_id)

    def on_arrival(self, request: Request, now: float) -> None:
        """Begin the record of a try."""
        if request.request_id in self._tries:
            return
        self.revision += 1
        self.activity.add("arrived")
        self._tries[request.request_id] = TryRecord(
            now, len(request.token_ids), request.tenant, request.priority
        )
        if len(self._tries) > self.kept:
            self._tries.popitem(last=False)

    def on_prefill_done(
        self, done: PrefillDone, source: WorkerId | None, n_transferred: int
    ) -> None:
        """Record a finished prefill.

        Args:
            done: the prefill worker's message.
            source: the kvstore that holds its prefix, by the placement.
            n_transferred: tokens of the prefix that its own kvstore did not have.
        """
        record = self._tries.get(done.request_id)
        if record is None:
            return
        self.revision += 1
        record.n_cached = done.n_cached
        record.fetched_from = (done.fetched_from or source) if done.n_cached else None
        record.queue_s, record.compute_s = done.queue_s, done.compute_s
        record.drain_s, record.fetch_s = done.drain_s, done.fetch_s
        self.reuse.n_prompts += 1
        self.reuse.n_tokens += record.n_tokens
        self.reuse.n_cached += done.n_cached
        self.activity.add("prompt_tokens", record.n_tokens)
        self.activity.add("cached_tokens", done.n_cached)
        self.reuse.n_transferred += min(n_transferred, done.n_cached)

    def on_end(self, request_id: RequestId, end: TryEnd, now: float, *, n_new: int = 0) -> None:
        """Record the end of a try; only the first call counts."""
        record = self._tries.get(request_id)
        if record is None or record.end:
            return
        self.revision += 1
        record.end, record.n_new = end, n_new
        self.activity.add(end)
        if record.ttft_s is not None and n_new > 1:
            record.tbt_s = (now - record.arrived_s - record.ttft_s) / (n_new - 1)

    def on_commands(self, commands: list[AnyCommand], now: float) -> None:
        """Record the commands of the core."""
        for command in commands:
            match command:
                case Deliver(request_id=request_id, finish=finish):
                    if (record := self._tries.get(request_id)) is not None:
                        record.ttft_s = now - record.arrived_s
                    if finish:
                        self.on_end(request_id, "finished", now, n_new=1)
                case Reject(request_id=request_id):
                    self.on_end(request_id, "rejected", now)
                case Fail(request_id=request_id):
                    self.on_end(request_id, "failed", now)
                case Resubmit(request_id=request_id):
                    self.on_end(request_id, "placed_again", now)
                case _:
                    pass
