"""What the comparison of saved prefixes shows."""

from pathlib import Path

from benchmarks.cluster import Timing
from benchmarks.vllm_hit import HitTimes, hit_table, why_not


def times(miss_s: list[float], hit_s: list[float], n_cached: int) -> HitTimes:
    each = HitTimes()
    each.misses[1024] = [Timing(seconds, 0.0, 0) for seconds in miss_s]
    each.hits[1024] = [Timing(seconds, 0.0, n_cached) for seconds in hit_s]
    return each


def test_a_row_has_medians_and_how_a_hit_of_the_own_cache_compares() -> None:
    found = {"vllm": times([0.2, 0.2, 9.0], [0.02], 1024), "example": times([0.3], [0.1], 960)}
    assert hit_table([1024], found).splitlines()[2:] == [
        "| 1,024 tokens, vllm | 200 | 20.0 | 10.0 | 1.00 | 1,024 |",
        "| 1,024 tokens, example | 300 | 100.0 | 3.0 | 0.20 | 960 |",
    ]


def test_there_is_no_ratio_without_the_own_cache_and_no_row_without_a_hit() -> None:
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
