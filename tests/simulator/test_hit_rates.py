"""Hit rates: by hand, against a slow reference, and the published traces' known values."""

from pathlib import Path

import pytest

from halfmoon_scheduling.cache.eviction_policies import open_eviction_policy
from halfmoon_simulator.hit_rates import hit_rate
from halfmoon_simulator.papers import open_paper
from halfmoon_simulator.papers.experiment_runner import ExperimentRunner
from halfmoon_simulator.workloads.traces import TraceRequest, read_trace
from halfmoon_simulator.workloads.workload_sources import find_traces
from tests.nightly import by_day


def asks(*prompts: tuple[int, ...]) -> list[TraceRequest]:
    return [TraceRequest(0.0, 512 * len(blocks), 1, blocks) for blocks in prompts]


#: Of prompts by their blocks: the policy, its blocks, and the share that hits.
A_AGAIN, OFTEN, TWO = ((0, 1), (0, 2), (0, 1)), ((0,), (0,), (1,), (2,), (0,)), ((0, 1), (2,), (0,))


@pytest.mark.parametrize(
    ("prompts", "policy", "capacity", "rate"),
    [
        # 0 and 1 miss; 0 hits, 2 misses and evicts 1; 0 hits, 1 misses.
        (A_AGAIN, "lru", 2, 2 / 6),
        (A_AGAIN, "lru", None, 3 / 6),
        # 0 is used twice; 1 and 2 evict each other, not 0.
        (OFTEN, "lfu", 2, 2 / 5),
        (OFTEN, "lru", 2, 1 / 5),
        (TWO, "length_aware_later", 2, 0),
        (TWO, "length_aware", 2, 1 / 4),
    ],
)
def test_a_hit_rate_is_that_worked_out_by_hand(
    prompts: tuple[tuple[int, ...], ...], policy: str, capacity: int | None, rate: float
) -> None:
    assert hit_rate(asks(*prompts), open_eviction_policy(policy), capacity) == rate


@pytest.mark.parametrize(
    ("file_name", "values"),
    [
        ("conversation_trace.jsonl", (0.0445, 0.2112, 0.3257, 0.3546, 0.3637, 0.3664)),
        ("synthetic_trace.jsonl", (0.0825, 0.4235, 0.6242, 0.6396, 0.6396, 0.6396)),
    ],
)
def test_lru_on_the_published_traces(file_name: str, values: tuple[float, ...]) -> None:
    path = Path(find_traces()) / file_name
    if not path.is_file():
        pytest.skip(f"{file_name} is not at hand; it is published by kvcache-ai/Mooncake")
    requests = read_trace(path)
    known = dict(zip((1_000, 10_000, 30_000, 50_000, 100_000, None), values, strict=True))
    for capacity in list(known)[:: by_day(3, at_night=1)]:
        found = hit_rate(requests, open_eviction_policy("lru"), capacity)
        assert round(found, 4) == known[capacity], capacity


@pytest.mark.usefixtures("one_surrogate_for_all_runs")
@pytest.mark.parametrize("name", ["cache-policies", "capacity"])
def test_the_tables_without_a_cluster_say_which_traces_are_stand_ins(name: str) -> None:
    report = open_paper(name)(ExperimentRunner(folder="", n_requests=200))
    text = " ".join(report.setup)
    assert "SURROGATE" in text
    assert "CUT SHORT" in text
    assert all(len(row) == len(table.columns) for table in report.tables for row in table.rows)
