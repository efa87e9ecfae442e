"""The relations between admission modes, on a load of seconds; and what they are measured by."""

from dataclasses import replace

import pytest

from halfmoon_simulator.papers.experiment_runner import TTFT_SLO_S
from halfmoon_simulator.papers.overload import (
    MODES,
    OverloadCase,
    OverloadResult,
    checks_of,
    scenario,
)
from halfmoon_simulator.results.run_results import ClusterSample, RunResult, SimRequestRecord
from halfmoon_simulator.results.token_intervals import TokenIntervals
from halfmoon_simulator.scenario import run_scenario
from halfmoon_simulator.workloads.workload_sources import WorkloadSpec

#: Decode is short; Poisson, so that nothing repeats.
LOAD = OverloadCase(
    "small",
    WorkloadSpec(source="arxiv-summarization", n_requests=700, rate_per_s=5.5, seed=0),
    n_prefill=4,
    n_decode=1,
)


def test_modes_are_related_as_they_should_where_decode_is_short() -> None:
    outcomes = {mode: OverloadResult.of(run_scenario(scenario(LOAD, mode))) for mode in MODES}
    print(outcomes)
    # Better forecasts refuse less.
    refused = [outcomes[mode].n_refused for mode in ("early", "predicted", "lookahead")]
    assert refused == sorted(refused, reverse=True)
    assert refused[0] > refused[1]
    assert outcomes["predicted"].prefill_swing < outcomes["early"].prefill_swing
    for mode, outcome in outcomes.items():  # nine of ten admitted keep both limits
        assert outcome.n_good >= 0.9 * (outcome.n_requests - outcome.n_refused), mode
        assert outcome.ttft_p99_s <= TTFT_SLO_S, mode
        # Only baseline refuses what has been prefilled.
        assert (outcome.n_late > 0) == (mode == "baseline"), mode


def a_record(
    index: int, at_s: float, outcome: str, ttft_s: float, tbt_s: float
) -> SimRequestRecord:
    timed = {"first_token_s": at_s + ttft_s, "intervals": TokenIntervals(((9, tbt_s),))}
    return SimRequestRecord(index, at_s, 100, 10, outcome=outcome, **timed)  # type: ignore[arg-type]


def a_sample(at_s: float, backlog_s: float, step_s: float) -> ClusterSample:
    return ClusterSample(at_s, backlog_s, backlog_s, step_s, step_s, 0, 0, 0, 0, 0)


def test_good_is_what_finished_within_both_limits_and_late_counts_as_refused() -> None:
    records = [
        a_record(0, 0.0, "finished", 30.0, 0.04),
        a_record(1, 1.0, "finished", 30.1, 0.04),
        a_record(2, 2.0, "finished", 30.0, 0.041),
        a_record(3, 3.0, "wasted", 1.0, 0.01),
        a_record(4, 4.0, "rejected", 1.0, 0.01),
    ]
    outcome = OverloadResult.of(RunResult(records, []))
    assert (outcome.n_requests, outcome.n_refused, outcome.n_late, outcome.n_good) == (5, 2, 1, 1)


def test_loads_are_watched_while_requests_arrive_and_not_while_queues_fill_or_drain() -> None:
    records = [a_record(i, 10.0 * i, "finished", 1.0, 0.01) for i in range(11)]
    steady = [a_sample(at_s, backlog_s, 0.0325) for at_s, backlog_s in ((10, 30.0), (100, 60.0))]
    outside = [a_sample(0.0, 1e6, 1e6), a_sample(9.9, 1e6, 1e6), a_sample(100.1, 1e6, 1e6)]
    outcome = OverloadResult.of(RunResult(records, [*outside, *steady]))
    assert outcome.prefill_swing == pytest.approx(0.5)  # 1 and 2
    assert outcome.decode_swing == 0


def test_a_relation_that_fails_on_one_load_fails_and_names_it() -> None:
    def result(n_refused: int) -> OverloadResult:
        return OverloadResult(100, n_refused, 0, 100 - n_refused, 1.0, 0.1, 0.1)

    falling = {mode: result(15 - i) for i, mode in enumerate(MODES)}
    level = {mode: result(15) for mode in MODES}
    for second, name, ends in ((falling, "small", "(all)"), (level, "level", "(not on level)")):
        checks = checks_of("our", [(LOAD, falling), (replace(LOAD, name=name), second)])
        [found] = [one for one in checks if "early refuses more than predicted" in one.sentence]
        assert found.holds == (second is falling)
        assert found.sentence.endswith(ends)
