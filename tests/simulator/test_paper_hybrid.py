"""The comparison of hybrid workers: what is counted, what is checked, and that it runs."""

import msgspec
import pytest

from halfmoon_simulator.papers.experiment_runner import ExperimentRunner
from halfmoon_simulator.papers.hybrid import (
    LOADS,
    SYSTEMS,
    HybridOutcome,
    hybrid,
    hybrid_checks,
)
from halfmoon_simulator.results.run_results import RunResult, SimRequestRecord
from halfmoon_simulator.results.token_intervals import TokenIntervals


def an_outcome(**changes: float) -> HybridOutcome:
    shares = dict.fromkeys(("in_ttft", "in_tbt", "goodput"), 0.9)
    times = {"ttft_mean_s": 0.3, "ttft_p99_s": 2.0, "tail_p99_s": 0.05}
    return HybridOutcome(**{"n_role_changes": 0, **shares, **times, **changes})  # type: ignore[arg-type]


def test_a_good_request_is_within_both_limits_and_its_tbt_is_the_mean() -> None:
    def record(ttft_s: float, *steps_s: float, outcome: str = "finished") -> SimRequestRecord:
        intervals = TokenIntervals(tuple((1, step_s) for step_s in steps_s))
        timed = {"first_token_s": ttft_s, "intervals": intervals}
        return SimRequestRecord(0, 0.0, 10, 3, outcome=outcome, **timed)  # type: ignore[arg-type]

    failed = record(1.0, 0.01, outcome="failed")
    records = [record(1.9, 0.049, 0.001), record(2.1, 0.01, 0.01), record(1.9, 0.05, 0.002), failed]
    outcome = HybridOutcome.of(RunResult(records=records, samples=[]))
    assert (outcome.in_ttft, outcome.in_tbt, outcome.goodput) == (0.5, 0.5, 0.25)


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, [True, True, True]),
        ({"goodput": 0.946}, [True, True, True]),
        ({"goodput": 0.944}, [False, True, True]),
        ({"ttft_mean_s": 0.21}, [True, False, True]),
        ({"ttft_p99_s": 1.6}, [True, True, False]),
    ],
)
def test_each_measure_is_compared_with_the_better_of_both(
    changes: dict[str, float], holds: list[bool]
) -> None:
    split = an_outcome(goodput=0.95, ttft_p99_s=1.5)
    aggregated = an_outcome(ttft_mean_s=0.2)
    ours = an_outcome(**{"goodput": 0.95, "ttft_mean_s": 0.2, "ttft_p99_s": 1.5, **changes})
    assert [check.holds for check in hybrid_checks(1.0, split, aggregated, ours)] == holds


@pytest.mark.usefixtures("one_surrogate_for_all_runs")
def test_every_system_runs_at_every_load_and_the_start_of_the_trace_is_said() -> None:
    report = hybrid(ExperimentRunner(folder="", n_requests=20, n_jobs=1))
    (table,) = report.tables
    assert len(table.rows) == len(LOADS) * len(SYSTEMS)
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert report.setup[0].startswith("CUT SHORT: only the first 20")
    assert len(report.checks) == 3 * len(LOADS)
    msgspec.json.encode(report)
