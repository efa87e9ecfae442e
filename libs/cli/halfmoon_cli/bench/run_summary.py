"""Summarise the records of a run. No I/O."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from halfmoon_cli.bench.bench_record import BenchRecord, Slo
from halfmoon_cli.bench.load_generator import RunProgress
from halfmoon_simulator.results.run_results import DistributionSummary, summarize_values


class GeneratorLag(msgspec.Struct, frozen=True, kw_only=True):
    """Lateness of the load generator itself, which is not the endpoint's fault."""

    #: Delay of sending behind the schedule.
    send_lag_s: DistributionSummary
    #: Sampled lateness of the event loop.
    loop_lag_s: DistributionSummary
    #: Requests that waited for the bound on requests under way.
    n_held: int
    most_in_flight: int

    @property
    def lags(self) -> bool:
        """True when the lateness makes the figures doubtful."""
        return self.loop_lag_s.p99 > 0.02 or (not self.n_held and self.send_lag_s.p99 > 0.02)


class BenchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in numbers. Times are seconds from the scheduled moment of a request.

    The times of no request are NaN, which JSON has as null.
    """

    n_requests: int
    n_finished: int
    n_refused: int
    n_failed: int
    #: Numbers of requests by status and reason.
    refusals: dict[str, int]
    failures: dict[str, int]
    #: From the first arrival to the last end.
    duration_s: float
    #: Scheduled requests per second between the first and the last of them.
    offered_per_s: float
    finished_per_s: float
    ttft_s: DistributionSummary
    #: Mean time between tokens of each request, over the requests.
    tbt_s: DistributionSummary
    #: Mean of the longest 10 % of gaps of each request, over the requests.
    tbt_tail_s: DistributionSummary
    #: All gaps between events with tokens, of all requests.
    gap_s: DistributionSummary
    e2e_s: DistributionSummary
    #: Tokens of finished requests.
    n_prompt_tokens: int
    n_output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    #: Prompt tokens served from a cache; None: the endpoint does not say.
    n_cached_tokens: int | None
    #: Share of all output tokens that came in one event with another.
    bundled: float
    #: Requests that finished within both limits; refused and failed ones are not good.
    n_good: int
    good_share: float
    goodput_per_s: float
    #: Finished requests that missed each limit.
    n_missed_ttft: int
    n_missed_tbt: int
    generator: GeneratorLag
    #: Whether the run was stopped before all requests had ended.
    cut_short: bool


def summarize_run(progress: RunProgress, slo: Slo, *, cut_short: bool = False) -> BenchSummary:
    """Summarise the requests of a run that have ended."""
    records = progress.records
    finished = [record for record in records if record.outcome == "finished"]
    missed = [slo.missed(record) for record in records]
    first_s = min((r.scheduled_s for r in records), default=0.0)
    last_s = max((r.scheduled_s for r in records), default=0.0)
    duration_s = max((r.ended_s or 0.0 for r in records), default=0.0) - first_s
    n_prompt = sum(r.n_prompt if r.n_prompt is not None else r.asked_input for r in finished)
    n_out = sum(r.n_out for r in finished)
    n_events = sum(len(r.gaps_s) + (r.first_s is not None) for r in finished)
    cached = [r.n_cached for r in finished if r.n_cached is not None]
    n_good = sum(not reasons for reasons in missed)

    def per_second(n: float) -> float:
        return n / duration_s if duration_s > 0 else 0.0

    return BenchSummary(
        n_requests=len(records),
        n_finished=len(finished),
        n_refused=sum(r.outcome == "refused" for r in records),
        n_failed=sum(r.outcome == "failed" for r in records),
        refusals=_counted(r for r in records if r.outcome == "refused"),
        failures=_counted(r for r in records if r.outcome == "failed"),
        duration_s=duration_s,
        offered_per_s=(len(records) - 1) / (last_s - first_s) if last_s > first_s else 0.0,
        finished_per_s=per_second(len(finished)),
        ttft_s=_summarize([r.ttft_s for r in finished if r.ttft_s is not None]),
        tbt_s=_summarize([r.tbt_s for r in finished if r.tbt_s is not None]),
        tbt_tail_s=_summarize([r.tbt_tail_s for r in finished if r.tbt_tail_s is not None]),
        gap_s=_summarize([gap for r in finished for gap in r.gaps_s]),
        e2e_s=_summarize([r.e2e_s for r in finished if r.e2e_s is not None]),
        n_prompt_tokens=n_prompt,
        n_output_tokens=n_out,
        prompt_tokens_per_s=per_second(n_prompt),
        output_tokens_per_s=per_second(n_out),
        n_cached_tokens=sum(cached) if cached else None,
        bundled=max(0.0, 1 - n_events / n_out) if n_out else 0.0,
        n_good=n_good,
        good_share=n_good / len(records) if records else 0.0,
        goodput_per_s=per_second(n_good),
        n_missed_ttft=sum("ttft" in reasons for reasons in missed),
        n_missed_tbt=sum("tbt" in reasons for reasons in missed),
        generator=GeneratorLag(
            send_lag_s=summarize_values([r.lag_s for r in records if r.lag_s is not None]),
            loop_lag_s=summarize_values(progress.loop_lags_s),
            n_held=progress.n_held,
            most_in_flight=progress.most_in_flight,
        ),
        cut_short=cut_short,
    )


def _summarize(values: Sequence[float]) -> DistributionSummary:
    """Return mean and quantiles; NaN, which is no latency, where there is no value."""
    return summarize_values(values) if values else DistributionSummary(*[math.nan] * 5)


def _counted(records: Iterable[BenchRecord]) -> dict[str, int]:
    """Count the reasons, the most frequent first."""
    return dict(Counter(record.reason for record in records).most_common())
