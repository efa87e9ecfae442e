"""Record what happens in a run, and count it: faults, ends of requests, times of successes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.chaos.answer_check import ReceivedAnswer, Verdict, judge


@dataclass(frozen=True)
class AskedRequest:
    """One request as it was sent."""

    number: int
    conductor: str
    began_s: float
    right: tuple[int, ...]


@dataclass
class ChaosLedger:
    """All counts of a run, and its violations."""

    faults: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    #: Named errors by code.
    errors: Counter[str] = field(default_factory=Counter)
    #: Processes that ended without a fault, by name and exit status.
    own_ends: Counter[str] = field(default_factory=Counter)
    #: What the faults did, such as connections that were cut.
    effects: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    #: Moments of right answers, in order.
    successes_s: list[float] = field(default_factory=list)
    n_requests: int = 0
    n_tokens: int = 0
    #: Connections by which clients went on with their streams.
    n_resumed: int = 0
    #: Longest time in which a stream brought no token, from its request on.
    longest_stream_pause_s: float = 0.0
    #: Seconds from the last fault's end to the first later success of a later request.
    recovery_s: float | None = None
    _calm_since_s: float | None = None

    def on_calm(self, now_s: float) -> None:
        """Record the end of the last fault."""
        self._calm_since_s = now_s

    def on_answer(
        self, asked: AskedRequest, answer: ReceivedAnswer, now_s: float, *, conductor_was_down: bool
    ) -> Verdict:
        """Judge and count an answer; return the verdict."""
        verdict = judge(answer, asked.right, conductor_was_down=conductor_was_down)
        self.n_requests += 1
        self.n_tokens += len(answer.tokens)
        self.verdicts[verdict] += 1
        if verdict is Verdict.NAMED:
            self.errors[answer.code] += 1
        if verdict is Verdict.RIGHT:
            self._on_success(asked, now_s)
        if verdict.is_violation:
            self.violations.append(_describe(verdict, asked, answer, now_s))
        return verdict

    def on_stream(self, began_s: float, arrivals_s: Sequence[float]) -> None:
        """Record when a stream brought tokens, across the connections of its client."""
        for earlier_s, later_s in pairwise((began_s, *arrivals_s)):
            self.longest_stream_pause_s = max(self.longest_stream_pause_s, later_s - earlier_s)

    def _on_success(self, asked: AskedRequest, now_s: float) -> None:
        self.successes_s.append(now_s)
        calm_s = self._calm_since_s
        if self.recovery_s is None and calm_s is not None and asked.began_s >= calm_s:
            self.recovery_s = now_s - calm_s

    @property
    def longest_pause_s(self) -> float:
        """Longest time between two successes; 0 with fewer than two."""
        return max((later - earlier for earlier, later in pairwise(self.successes_s)), default=0.0)


def _describe(verdict: Verdict, asked: AskedRequest, answer: ReceivedAnswer, now_s: float) -> str:
    got, right = answer.tokens, asked.right
    at = next((i for i, t in enumerate(got) if i >= len(right) or t != right[i]), len(got))
    return (
        f"request {asked.number} at {asked.conductor}, {asked.began_s:.1f} to {now_s:.1f} s:"
        f" {verdict.value}; {len(got)} of {len(right)} tokens, the first {at} are right,"
        f" then {list(got[at : at + 4])} for {list(right[at : at + 4])};"
        f" {answer.end.value} {answer.status or ''} {answer.code} {answer.message}".rstrip()
    )
