"""A run in one table. No I/O."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from halfmoon_cli.bench.load.bench_record import BenchRecord, Slo
from halfmoon_simulator.results.run_results import DistributionSummary, summarize_values


class GeneratorLag(msgspec.Struct, frozen=True, kw_only=True):
    """How well the load was kept to: what is late here is not the endpoint's fault."""

    #: How much later than scheduled requests were sent.
    send_lag_s: DistributionSummary
    #: How late the event loop was, sampled.
    loop_lag_s: DistributionSummary
    #: Requests that waited because as many as allowed were under way.
    n_held: int
    most_in_flight: int

    @property
    def lags(self) -> bool:
        """Whether it was so late that its figures are in doubt."""
        return self.loop_lag_s.p99 > 0.02 or (not self.n_held and self.send_lag_s.p99 > 0.02)


class BenchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in numbers. Times are seconds and count from when a request was to be sent."""

    n_requests: int
    n_finished: int
    n_refused: int
    n_failed: int
    #: By status and reason, and how many.
    refusals: dict[str, int]
    failures: dict[str, int]
    #: From the first arrival to the last end.
    duration_s: float
    #: Requests that were to be sent, per second of the time in which they were.
    offered_per_s: float
    finished_per_s: float
    ttft_s: DistributionSummary
    #: Each request's mean time between tokens, over the requests.
    tbt_s: DistributionSummary
    #: Each request's mean of its longest 10 % of gaps, over the requests.
    tbt_tail_s: DistributionSummary
    #: All gaps between events with tokens, of all requests.
    gap_s: DistributionSummary
    e2e_s: DistributionSummary
    #: Of finished requests.
    n_prompt_tokens: int
    n_output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    #: Prompt tokens that were not computed anew; None: the endpoint does not say.
    n_cached_tokens: int | None
    #: Share of all output tokens that came in one event with another.
    bundled: float
    #: Requests that finished within both limits; refused and failed ones are not good.
    n_good: int
    good_share: float
    goodput_per_s: float
    #: Finished requests that missed a limit, by which.
    n_missed_ttft: int
    n_missed_tbt: int
    generator: GeneratorLag
    #: Whether it was stopped before all were sent and answered.
    cut_short: bool


def summarize_run(
    records: Sequence[BenchRecord],
    slo: Slo,
    *,
    loop_lags_s: Sequence[float] = (),
    n_held: int = 0,
    most_in_flight: int = 0,
    cut_short: bool = False,
) -> BenchSummary:
    """A run's numbers.

    Args:
        records: of all requests that are over.
        slo: limits that make a request good.
        loop_lags_s: samples of how late the event loop was.
        n_held: requests that waited for the bound on those under way.
        most_in_flight: how many were under way at once.
        cut_short: whether it was stopped early.
    """
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
        ttft_s=summarize_values([r.ttft_s for r in finished if r.ttft_s is not None]),
        tbt_s=summarize_values([r.tbt_s for r in finished if r.tbt_s is not None]),
        tbt_tail_s=summarize_values([r.tbt_tail_s for r in finished if r.tbt_tail_s is not None]),
        gap_s=summarize_values([gap for r in finished for gap in r.gaps_s]),
        e2e_s=summarize_values([r.e2e_s for r in finished if r.e2e_s is not None]),
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
            loop_lag_s=summarize_values(loop_lags_s),
            n_held=n_held,
            most_in_flight=most_in_flight,
        ),
        cut_short=cut_short,
    )


def _counted(records: Iterable[BenchRecord]) -> dict[str, int]:
    """How often each reason came, the most frequent first."""
    return dict(Counter(record.reason for record in records).most_common())
