"""Record the times and the outcome of one request."""

from array import array
from dataclasses import dataclass, field
from typing import Literal

#: A request's time between tokens in one number: the mean over its tokens, the mean of its
#: longest 10 % of gaps, or its longest gap.
TbtDefinition = Literal["mean", "tail", "max"]

RequestEnd = Literal["", "finished", "refused", "failed"]


@dataclass(eq=False, slots=True)
class BenchRecord:
    """Times and outcome of one request. Moments are seconds since the start of the run."""

    index: int
    #: When the plan wants it sent: all its times count from then.
    scheduled_s: float
    #: Tokens that the plan gives prompt and answer.
    asked_input: int
    asked_output: int
    sent_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    ended_s: float | None = None
    #: "" while it is under way; "refused": a status other than 200; "failed": no whole answer.
    outcome: RequestEnd = ""
    reason: str = ""
    #: HTTP status; 0 without an answer.
    status: int = 0
    #: Whether a refusal said when to try again.
    has_retry_after: bool = False
    #: Token counts of the endpoint; without them: the number of events, and None.
    n_prompt: int | None = None
    n_out: int = 0
    n_cached: int | None = None
    #: Seconds between events that brought tokens.
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))

    def on_token(self, at_s: float) -> None:
        """Record an event that brought one token or several."""
        if self.last_s is None:
            self.first_s = at_s
        else:
            self.gaps_s.append(at_s - self.last_s)
        self.last_s = at_s
        self.n_out += 1

    def finish(self, at_s: float, outcome: RequestEnd, reason: str = "") -> None:
        """Record the end of the request."""
        self.ended_s, self.outcome, self.reason = at_s, outcome, reason

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, from the scheduled moment."""
        return None if self.first_s is None else self.first_s - self.scheduled_s

    @property
    def e2e_s(self) -> float | None:
        """Time to the end, from the scheduled moment."""
        return None if self.ended_s is None else self.ended_s - self.scheduled_s

    @property
    def lag_s(self) -> float | None:
        """Delay of sending behind the schedule."""
        return None if self.sent_s is None else self.sent_s - self.scheduled_s

    @property
    def tbt_s(self) -> float | None:
        """Mean time between tokens; None for fewer than two."""
        if self.first_s is None or self.last_s is None or self.n_out < 2:
            return None
        return (self.last_s - self.first_s) / (self.n_out - 1)

    @property
    def tbt_tail_s(self) -> float | None:
        """Mean of the longest 10 % of gaps, of one at least; None without a gap."""
        if not self.gaps_s:
            return None
        longest = sorted(self.gaps_s)[-max(1, len(self.gaps_s) // 10) :]
        return sum(longest) / len(longest)

    def tbt_by(self, by: TbtDefinition) -> float | None:
        """Return the time between tokens by this definition."""
        match by:
            case "mean":
                return self.tbt_s
            case "tail":
                return self.tbt_tail_s
            case "max":
                return max(self.gaps_s, default=None)


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency limits of a good request, in seconds; None: no limit."""

    ttft_s: float | None = None
    tbt_s: float | None = None
    tbt_by: TbtDefinition = "mean"

    def missed(self, record: BenchRecord) -> list[str]:
        """Return the reasons that make a request bad: its outcome, "ttft", "tbt"."""
        if record.outcome != "finished":
            return [record.outcome]
        reasons: list[str] = []
        if self.ttft_s is not None and (record.ttft_s is None or record.ttft_s > self.ttft_s):
            reasons.append("ttft")
        tbt_s = record.tbt_by(self.tbt_by)
        if self.tbt_s is not None and tbt_s is not None and tbt_s > self.tbt_s:
            reasons.append("tbt")
        return reasons
