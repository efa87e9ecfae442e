"""Workloads that are made: the same for a seed, as they say, and stand-ins near the originals."""

from functools import cache
from pathlib import Path

import pytest

from halfmoon_simulator.workloads.synthetic_workloads import (
    DATASETS,
    speed_up,
    spread_ticks,
    synthetic_requests,
)
from halfmoon_simulator.workloads.traces import BadTrace, TraceRequest, trace_statistics
from halfmoon_simulator.workloads.workload_sources import (
    DescribedWorkload,
    WorkloadSpec,
    make_workload,
)


@cache
def made(source: str) -> DescribedWorkload:
    return make_workload(spec(source))


def spec(source: str, **changes: object) -> WorkloadSpec:
    return WorkloadSpec(**{"source": source, "folder": "", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["conversation", "arxiv", "synthetic", "l-eval"])
def test_made_requests_are_their_seeds_and_what_a_trace_may_hold(source: str) -> None:
    requests = made(source).requests
    assert requests == make_workload(spec(source)).requests
    assert requests != make_workload(spec(source, seed=4)).requests
    parents: dict[int, int | None] = {}
    for request in requests:
        assert len(request.blocks) == -(-request.n_input // 512)
        for block, parent in zip(request.blocks, (None, *request.blocks), strict=False):
            assert parents.setdefault(block, parent) == parent, "a block has two prefixes"
    assert [r.at_s for r in requests] == sorted(r.at_s for r in requests)


@pytest.mark.parametrize(
    ("source", "n", "mean_input", "mean_output", "reuse"),
    [
        ("conversation", 12_031, 12_035, 343, 0.366),
        ("arxiv", 23_608, 7_590, 182, 0.553),
        ("synthetic", 3_993, 15_325, 149, 0.640),
    ],
)
def test_a_stand_in_is_near_the_published_statistics(
    source: str, n: int, mean_input: float, mean_output: float, reuse: float
) -> None:
    workload = made(source)
    facts = trace_statistics(workload.requests)
    assert "SURROGATE" in workload.description
    assert facts.n_requests == n
    assert facts.mean_input == pytest.approx(mean_input, rel=0.1)
    assert facts.mean_output == pytest.approx(mean_output, rel=0.1)
    assert facts.reuse == pytest.approx(reuse, abs=0.06)


def test_answers_can_be_made_longer() -> None:
    plain, longer = (
        make_workload(spec("l-eval", n_requests=50, output_times=times)).requests
        for times in (1.0, 2.5)
    )
    assert [r.n_output for r in longer] == [round(2.5 * r.n_output) for r in plain]
    assert [(r.at_s, r.blocks) for r in longer] == [(r.at_s, r.blocks) for r in plain]


@pytest.mark.parametrize("field", ["speedup", "rate_per_s", "output_times"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_makes_no_workload_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is"):
        spec("l-eval", **{field: value})


def test_a_data_set_has_its_lengths_rate_and_reuse() -> None:
    requests = synthetic_requests(
        DATASETS["simulated-16k"], n_requests=2_000, rate_per_s=2.0, seed=1
    )
    facts = trace_statistics(requests)
    assert (facts.mean_input, facts.mean_output) == (16_384, 512)
    assert facts.duration_s == pytest.approx(1_000, rel=0.1)
    assert facts.reuse == pytest.approx(0.5 * 7 / 8, abs=0.01)  # the first of 8 finds nothing


def test_pauses_within_sessions_shrink_with_the_rest_and_are_not_spread() -> None:
    requests = [
        TraceRequest(0.0, 5, 5, (0,), "a"),
        TraceRequest(3.0, 5, 5, (1,), "a"),  # so long after the one before has ended
        TraceRequest(0.0, 5, 5, (2,)),
        TraceRequest(6.0, 5, 5, (3,), "b"),
        TraceRequest(0.0, 5, 5, (4,), "b"),
    ]
    assert [r.at_s for r in speed_up(requests, 2.0)] == [0.0, 1.5, 0.0, 3.0, 0.0]
    assert [r.at_s for r in spread_ticks(requests)] == [0.0, 3.0, 3.0, 6.0, 0.0]
    assert [r.blocks for r in spread_ticks(requests)] == [r.blocks for r in requests]


def test_a_file_of_ones_own_is_a_source_and_an_unknown_one_says_what_there_is(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}\n')
    workload = make_workload(spec(str(path)))
    assert len(workload.requests) == 1
    assert "of your own" in workload.description
    with pytest.raises(BadTrace, match=r"conversation.*l-eval"):
        make_workload(spec("nowhere"))
