"""Hold the results of a run: a record per request, samples over time, and their summary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from halfmoon_simulator.results.token_intervals import TokenIntervals

#: How a request ended. "wasted": refused by decode after its prefill had been computed.
OUTCOMES = ("finished", "rejected", "wasted", "failed")


@dataclass(eq=False, slots=True)
class SimRequestRecord:
    """One client's request, all tries together."""

    index: int
    arrived_s: float
    n_input: int
    n_output: int
    #: Its own limit of the time to first token; None: the run's.
    ttft_slo_s: float | None = None
    #: Turns of its session before it.
    turn: int = 0
    #: One of `OUTCOMES`; "" while it is under way.
    outcome: str = ""
    reason: str = ""
    first_token_s: float | None = None
    ended_s: float | None = None
    #: Prompt tokens that the first try found cached.
    n_cached: int = 0
    #: Tokens the client has.
    n_out: int = 0
    attempts: int = 0
    prefill: str = ""
    decode: str = ""
    #: Why its last try was placed there, or was not placed; "" unless decisions are kept.
    why: str = ""
    intervals: TokenIntervals = field(default_factory=TokenIntervals)

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None when there was none."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    def meets(self, ttft_slo_s: float | None, tbt_slo_s: float | None) -> bool:
        """Return whether it finished within both limits; TBT is the mean of its longest 10 %.

        A limit of its own counts in place of `ttft_slo_s`.
        """
        ttft_s = self.ttft_s
        if self.ttft_slo_s is not None:
            ttft_slo_s = self.ttft_slo_s
        if self.outcome != "finished" or ttft_s is None:
            return False
        if ttft_slo_s is not None and ttft_s > ttft_slo_s:
            return False
        return tbt_slo_s is None or self.intervals.longest_tenth_s() <= tbt_slo_s


class ClusterSample(msgspec.Struct, frozen=True, array_like=True):
    """The cluster at one moment."""

    at_s: float
    #: Predicted seconds of work at prefill workers: mean and largest.
    prefill_backlog_s: float
    prefill_backlog_max_s: float
    #: Seconds of a step at decode workers over what they run now: mean and largest.
    decode_step_s: float
    decode_step_max_s: float
    n_running: int
    n_ended: int
    n_rejected: int
    #: Prompt tokens of all prefills so far: computed, and found cached.
    computed_tokens: int
    cached_tokens: int


class DistributionSummary(msgspec.Struct, frozen=True):
    """A distribution in a few numbers."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in one row. Times are seconds."""

    n_requests: int
    n_finished: int
    n_rejected: int
    n_wasted: int
    n_failed: int
    #: From the first arrival to the last end.
    duration_s: float
    ttft_s: DistributionSummary
    #: Each request's mean time between tokens, over the requests.
    tbt_s: DistributionSummary
    #: Each request's mean of its longest 10 %, over the requests.
    tbt_tail_s: DistributionSummary
    #: Share of prompt tokens, of those that were prefilled, whose KV was reused.
    reused: float
    #: The same for the first turns of sessions, the second ones, and so on; empty without sessions.
    reused_by_turn: tuple[float, ...] = ()
    output_tokens_per_s: float
    #: Requests that finished within both SLOs: number, and per second of the run.
    n_good: int
    goodput_per_s: float
    #: Share of time in which engines computed, over the workers of a pool.
    prefill_busy: float
    decode_busy: float
    #: Standard deviation of the pools' loads over time: prefill backlog over the TTFT SLO,
    #: decode step over the TBT SLO (or seconds, without SLOs).
    prefill_load_std: float
    decode_load_std: float
    #: Bytes of hot prefixes that were copied between kvstores ahead of requests.
    copied_bytes: int = 0
    #: Workers that went over to the other side.
    n_role_changes: int = 0
    #: Blocks that kvstores leased to readers: from memory, and from the disk first.
    n_from_memory: int = 0
    n_from_disk: int = 0


@dataclass(eq=False)
class RunResult:
    """One run."""

    records: list[SimRequestRecord]
    samples: list[ClusterSample]
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    prefill_busy_s: float = 0.0
    decode_busy_s: float = 0.0
    n_prefill: int = 1
    n_decode: int = 1
    n_events: int = 0
    copied_bytes: int = 0
    n_role_changes: int = 0
    n_from_memory: int = 0
    n_from_disk: int = 0

    def finished(self) -> list[SimRequestRecord]:
        """Requests that got all their tokens."""
        return [record for record in self.records if record.outcome == "finished"]

    def summary(self) -> RunSummary:
        """Summarise the run in one row."""
        records = self.records
        finished = self.finished()
        ended = [record.ended_s for record in records if record.ended_s is not None]
        first_s = min((record.arrived_s for record in records), default=0.0)
        duration_s = max(ended, default=first_s) - first_s
        good = sum(record.meets(self.ttft_slo_s, self.tbt_slo_s) for record in records)
        prefilled = [record for record in records if record.first_token_s is not None]
        n_turns = max((record.turn for record in prefilled), default=0) + 1
        by_turn = [[r for r in prefilled if r.turn == turn] for turn in range(n_turns)]

        def count(outcome: str) -> int:
            return sum(record.outcome == outcome for record in records)

        def per_second(n: float) -> float:
            return n / duration_s if duration_s else 0.0

        loads = [s.prefill_backlog_s / (self.ttft_slo_s or 1.0) for s in self.samples]
        steps = [s.decode_step_s / (self.tbt_slo_s or 1.0) for s in self.samples]
        several = [record for record in finished if record.intervals.runs]
        return RunSummary(
            n_requests=len(records),
            n_finished=len(finished),
            n_rejected=count("rejected"),
            n_wasted=count("wasted"),
            n_failed=count("failed"),
            duration_s=duration_s,
            ttft_s=summarize_values([r.ttft_s for r in prefilled if r.ttft_s is not None]),
            tbt_s=summarize_values([r.intervals.mean_s for r in several]),
            tbt_tail_s=summarize_values([r.intervals.longest_tenth_s() for r in several]),
            reused=_reused(prefilled),
            reused_by_turn=tuple(map(_reused, by_turn)) if n_turns > 1 else (),
            output_tokens_per_s=per_second(sum(record.n_out for record in records)),
            n_good=good,
            goodput_per_s=per_second(good),
            prefill_busy=per_second(self.prefill_busy_s) / max(1, self.n_prefill),
            decode_busy=per_second(self.decode_busy_s) / max(1, self.n_decode),
            prefill_load_std=standard_deviation(loads),
            decode_load_std=standard_deviation(steps),
            copied_bytes=self.copied_bytes,
            n_role_changes=self.n_role_changes,
            n_from_memory=self.n_from_memory,
            n_from_disk=self.n_from_disk,
        )


def _reused(records: Sequence[SimRequestRecord]) -> float:
    """Return the share of prompt tokens whose KV was reused."""
    n_prompt = sum(record.n_input for record in records)
    return sum(record.n_cached for record in records) / n_prompt if n_prompt else 0.0


#: Called now and then with (simulated seconds, requests over, requests in all).
Progress = Callable[[float, int, int], None]


def summarize_values(values: Sequence[float]) -> DistributionSummary:
    """Mean and quantiles (nearest rank); zeros when there is nothing."""
    if not values:
        return DistributionSummary(0.0, 0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)
    n = len(ordered)

    def rank(q: float) -> float:
        return ordered[min(n - 1, int(q * n))]

    return DistributionSummary(sum(ordered) / n, rank(0.5), rank(0.9), rank(0.99), ordered[-1])


def standard_deviation(values: Sequence[float]) -> float:
    """Standard deviation."""
    if not values:
        return 0.0
    mean = sum(values) / len(values)
    return float((sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5)
