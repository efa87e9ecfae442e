"""What the comparisons with others show, when they end, and what they say of the goals."""

from collections import defaultdict
from pathlib import Path

import pytest

import benchmarks.blocks.__main__ as blocks
import benchmarks.transfer.__main__ as transfer
from benchmarks.cluster import Timing
from benchmarks.routed_fleet import fleet_table
from benchmarks.time_limit import rounds_within
from benchmarks.transfer.__main__ import Results
from benchmarks.vllm_hit import HitTimes, hit_table, why_not
from halfmoon_cli.bench.bench_record import BenchRecord, Slo
from halfmoon_cli.bench.load_generator import RunProgress
from halfmoon_cli.bench.run_summary import BenchSummary, summarize_run

MIB = 1024 * 1024


# -- routers ---------------------------------------------------------------------------------------


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


def test_a_row_of_a_rate_that_was_run_has_medians_and_how_ours_compares_if_it_is_there() -> None:
    runs = {
        "ours": {4.0: [run_with([0.1, 0.3], 50), run_with([0.2], 60), run_with([9.0], 70)]},
        "theirs": {4.0: [run_with([0.4], 25, n_failed=1)]},
    }
    assert fleet_table([4.0], runs, "ours").splitlines()[2:] == [
        "| 4/s, ours | 200 | 1.00 | 300 / 300 | 0.60 | 4 of 4 |",
        "| 4/s, theirs | 400 | 0.50 | 400 / 400 | 0.25 | 1 of 2 |",
    ]
    alone = {"theirs": {4.0: [run_with([0.4])]}}
    (row,) = fleet_table([2.0, 4.0], alone, "ours").splitlines()[2:]
    assert row == "| 4/s, theirs | 400 | – | 400 / 400 | – | 1 of 1 |"


# -- saved prefixes --------------------------------------------------------------------------------


def times(miss_s: list[float], hit_s: list[float], n_cached: int) -> HitTimes:
    each = HitTimes()
    each.misses[1024] = [Timing(seconds, 0.0, 0) for seconds in miss_s]
    each.hits[1024] = [Timing(seconds, 0.0, n_cached) for seconds in hit_s]
    return each


def test_a_row_with_a_hit_has_medians_and_how_one_of_the_own_cache_compares() -> None:
    found = {"vllm": times([0.2, 0.2, 9.0], [0.02], 1024), "example": times([0.3], [0.1], 960)}
    assert hit_table([1024], found).splitlines()[2:] == [
        "| 1,024 tokens, vllm | 200 | 20.0 | 10.0 | 1.00 | 1,024 |",
        "| 1,024 tokens, example | 300 | 100.0 | 3.0 | 0.20 | 960 |",
    ]
    found = {"example": times([0.3], [0.1], 960), "halfmoon": HitTimes()}
    (row,) = hit_table([1024], found).splitlines()[2:]
    assert row == "| 1,024 tokens, example | 300 | 100.0 | 3.0 | – | 960 |"


def test_a_server_that_does_not_start_is_shown_with_the_first_reason_in_its_log(
    tmp_path: Path,
) -> None:
    log = tmp_path / "offloading.log"
    log.write_text(
        "WARNING system limits may give `OSError: [Errno 24] Too many open files`. Raise them\n"
        "(EngineCore pid=7) ERROR 11-22 20:17:01 [core.py:99] Exception: not on a CPU\n"
        "RuntimeError: Engine core initialization failed.\n"
    )
    assert why_not(tmp_path, RuntimeError("late")) == "Exception: not on a CPU"
    log.write_text("nothing to see\n")
    assert why_not(tmp_path, RuntimeError("late")) == "late"


# -- blocks and transfers --------------------------------------------------------------------------


def test_no_round_begins_that_would_pass_the_limit_and_the_first_always_does() -> None:
    assert list(rounds_within(3, minutes=60)) == [0, 1, 2]
    assert list(rounds_within(3, minutes=0)) == [0]


def test_a_peer_that_cannot_be_installed_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(transfer, "ENVIRONMENTS", tmp_path / "file" / "below")
    (tmp_path / "file").touch()
    problems: dict[str, str] = {}
    assert transfer.installed({"plain": None, "foreign": ["foreign==1"]}, problems) == ["plain"]
    assert problems["foreign"].startswith("can't be installed: ")


def test_a_block_is_compared_in_batches_by_speed_and_alone_by_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results: Results = defaultdict(list)
    results["halfmoon, tcp", "get", MIB] = [{"gb_per_s": 6.0, "p50_us": 200.0}]
    results["reference's store, tcp", "get", MIB] = [{"gb_per_s": 3.0, "p50_us": 100.0}]
    blocks.print_ratios([MIB], results)
    said = capsys.readouterr().out.splitlines()
    between = "halfmoon, tcp to reference's store, tcp"
    assert f"get, batches, {between}: 2.00; the goal is 1.5" in said
    assert f"get, a single block, {between}: 0.50; the goal is 1.0" in said


def test_a_transfer_is_compared_with_the_faster_peer(capsys: pytest.CaptureFixture[str]) -> None:
    results: Results = defaultdict(list)
    for label, rate in (
        ("halfmoon, tcp, native", 3.0), ("reference, tcp", 2.0), ("NIXL, tcp", 1.0),
    ):  # fmt: skip
        results[label, "read", MIB] = [{"gb_per_s": rate, "p50_us": 1.0}]
    transfer.print_ratios([MIB], results)
    said = capsys.readouterr().out
    assert "read, batches, halfmoon, tcp, native to reference, tcp or NIXL, tcp: 1.50;" in said
