"""What the comparison of routers shows."""

from benchmarks.routed_fleet import fleet_table
from halfmoon_cli.bench.bench_record import BenchRecord, Slo
from halfmoon_cli.bench.load_generator import RunProgress
from halfmoon_cli.bench.run_summary import BenchSummary, summarize_run


def run_with(ttfts_s: list[float], n_cached: int | None = None, n_failed: int = 0) -> BenchSummary:
    progress = RunProgress(len(ttfts_s) + n_failed)
    for i, ttft_s in enumerate(ttfts_s):
        record = BenchRecord(i, 0.0, 100, 1)
        record.n_cached = n_cached
        record.on_token(ttft_s)
        record.finish(9.0, "finished")
        progress.records.append(record)
    for i in range(n_failed):
        record = BenchRecord(len(ttfts_s) + i, 0.0, 100, 1)
        record.finish(9.0, "failed")
        progress.records.append(record)
    return summarize_run(progress, Slo(None, None, "tail"))


def test_a_row_has_medians_of_rounds_and_how_ours_compares() -> None:
    runs = {
        "ours": {4.0: [run_with([0.1, 0.3], 50), run_with([0.2], 60), run_with([9.0], 70)]},
        "theirs": {4.0: [run_with([0.4], 25, n_failed=1)]},
    }
    assert fleet_table([4.0], runs, "ours").splitlines()[2:] == [
        "| 4/s, ours | 200 | 1.00 | 300 / 300 | 0.60 | 4 of 4 |",
        "| 4/s, theirs | 400 | 0.50 | 400 / 400 | 0.25 | 1 of 2 |",
    ]


def test_a_rate_that_was_not_run_has_no_row_and_no_ratio_without_ours() -> None:
    runs = {"theirs": {4.0: [run_with([0.4])]}}
    (row,) = fleet_table([2.0, 4.0], runs, "ours").splitlines()[2:]
    assert row == "| 4/s, theirs | 400 | – | 400 / 400 | – | 1 of 1 |"
