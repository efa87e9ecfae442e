"""The search for the highest good rate, its loads, and what it shows."""

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from benchmarks.goodput.load_run import TextWriter
from benchmarks.goodput.loads import (
    LEAST_IN_FAMILY,
    MOST_TOKENS,
    arriving,
    heavy_slice,
    without_sharing,
)
from benchmarks.goodput.process_times import processor_s
from benchmarks.goodput.rate_search import RateSearch
from benchmarks.goodput.report import (
    RateResult,
    SearchResult,
    rates_table,
    search_table,
)
from halfmoon_cli.bench.bench_record import BenchRecord, Slo
from halfmoon_cli.bench.load_generator import RunProgress
from halfmoon_cli.bench.load_plan import plan_stats
from halfmoon_cli.bench.run_summary import BenchSummary, summarize_run
from halfmoon_simulator.workloads.traces import TraceRequest


def search_against(capacity: float, search: RateSearch) -> RateSearch:
    """Run a search against a system that serves every rate up to its capacity."""
    for rate in search.rates():
        assert rate not in search.tried
        search.record(rate, 1.0 if rate <= capacity else 0.5)
        assert len(search.tried) < 40
    return search


@pytest.mark.parametrize("capacity", [0.3, 1.0, 3.9, 4.0, 17.3, 250.0])
@pytest.mark.parametrize("first", [0.5, 4.0, 64.0])
def test_the_search_ends_close_below_the_capacity(capacity: float, first: float) -> None:
    search = search_against(capacity, RateSearch(first, precision=1.15))
    assert search.best is not None
    assert capacity / 1.15 - 1e-9 <= search.best <= capacity
    none = search_against(0.0, RateSearch(first, least=0.25))
    assert none.best is None and min(none.tried) == 0.25


def test_a_good_rate_above_a_bad_one_does_not_count() -> None:
    search = RateSearch(4.0)
    for rate, share in ((4.0, 0.95), (8.0, 0.8), (16.0, 0.99)):
        search.record(rate, share)
    assert (search.best, search.lowest_bad) == (4.0, 8.0)


def trace() -> list[TraceRequest]:
    """Two chats that begin alike, one of them in too few requests, and one too long."""
    chats = [
        TraceRequest(float(i), 512 * 4, 160, (0, 1, 100 + i, 200 + i))
        for i in range(LEAST_IN_FAMILY)
    ]
    rare = [TraceRequest(9.0, 512 * 3, 160, (0, 2, 300))]
    long = [TraceRequest(9.5, 16 * MOST_TOKENS + 512, 160, (0, 1, *range(400, 463)))]
    return [*chats, *rare, *long]


def test_the_heavy_load_keeps_chats_that_begin_like_many_others() -> None:
    heavy = heavy_slice(trace(), 100)
    assert [request.n_input for request in heavy] == [128] * LEAST_IN_FAMILY
    assert [request.n_output for request in heavy] == [10] * LEAST_IN_FAMILY
    shared = plan_stats([(request,) for request in heavy]).shared
    assert shared == pytest.approx(0.5 * (LEAST_IN_FAMILY - 1) / LEAST_IN_FAMILY)


def test_a_short_slice_has_few_chats_rather_than_the_beginnings_of_many() -> None:
    size = LEAST_IN_FAMILY + 1
    # Three chats that take turns, two requests each time.
    turns = [
        TraceRequest(float(i), 2048, 160, (0, 1 + i // 2 % 3, 100 + i)) for i in range(6 * size)
    ]
    size = 2 * size
    chats = [request.parts[1].key for request in heavy_slice(turns, size + 1)]
    assert set(chats) == {"block 1", "block 2"}
    assert len(chats) == size + 1
    assert len(heavy_slice(turns, 1000)) == 3 * size


def test_the_flat_load_has_the_same_lengths_and_shares_nothing() -> None:
    heavy = heavy_slice(trace(), 100)
    flat = without_sharing(heavy)
    assert [r.n_input for r in flat] == [r.n_input for r in heavy]
    assert plan_stats([(request,) for request in flat]).shared == 0


def test_requests_arrive_at_the_rate_and_come_again_with_other_prompts() -> None:
    flat = without_sharing(heavy_slice(trace(), 100))
    chains = arriving(flat, rate_per_s=50.0, seconds=20.0, seed=3)
    assert 800 < len(chains) < 1200
    assert all(chain[0].at_s < 20.0 for chain in chains)
    assert [chain[0].index for chain in chains] == list(range(len(chains)))
    assert plan_stats(chains).shared == 0


def test_a_text_has_a_letter_per_token_and_equal_parts_read_alike() -> None:
    first, second = [request.parts for request in heavy_slice(trace(), 2)]
    writer = TextWriter("salt")
    one, two = (msgspec.json.decode(writer.prompt(parts)) for parts in (first, second))
    assert len(one) == len(two) == 128
    assert one[:64] == two[:64]
    assert one[64:] != two[64:]
    assert msgspec.json.decode(TextWriter("other").prompt(first)) != one


def test_processor_time_is_that_of_a_process_and_its_children() -> None:
    burn = "sum(range(30_000_000)); print('done', flush=True); input()"
    parent = f"import subprocess; subprocess.run({[sys.executable, '-c', burn]!r})"
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", parent], **pipes) as started:
        assert started.stdout is not None
        started.stdout.readline()
        found = processor_s([started.pid]), processor_s([2**22 + 1])
        started.communicate(b"\n")
    assert found[0] > 0.1 and found[1] == 0.0


def summary_of(n_good: int, n_late: int) -> BenchSummary:
    progress = RunProgress(n_good + n_late)
    for i in range(n_good + n_late):
        record = BenchRecord(i, 0.0, 8, 2)
        record.on_token(0.01 if i < n_good else 1.0)
        record.finish(1.0, "finished")
        progress.records.append(record)
    return summarize_run(progress, Slo(ttft_s=0.1))


def test_the_table_has_each_system_at_its_highest_good_rate_and_the_ratio_to_it() -> None:
    good, bad = summary_of(19, 1), summary_of(10, 10)
    found = {
        "ours": [SearchResult(8.0, (RateResult(8.0, good, 1.5), RateResult(16.0, bad, 1.9)))],
        "theirs": [SearchResult(4.0, (RateResult(4.0, good, 1.2), RateResult(8.0, bad, 1.9)))],
        "none": [SearchResult(None, (RateResult(4.0, bad, 1.9),))],
    }
    rows = search_table("heavy", found).splitlines()[2:]
    assert rows[0].startswith("| ours | 8.00 | 1.00 | 0.95 | 10 / 1000 | ")
    assert rows[1].startswith("| theirs | 4.00 | 2.00 | 0.95 | ")
    assert rows[2].startswith("| none | 0.00 | – | – | ")
    rates = rates_table("heavy", found).splitlines()[2:]
    assert [row.split(" | ")[:3] for row in rates[:2]] == [
        ["| ours", "8.00", "0.95"],
        ["| ours", "16.00", "0.50"],
    ]
