"""The comparisons of blocks and transfers: when they end, and what they say of the goals."""

from collections import defaultdict
from pathlib import Path

import pytest

import benchmarks.blocks.__main__ as blocks
import benchmarks.transfer.__main__ as transfer
from benchmarks.time_limit import rounds_within
from benchmarks.transfer.__main__ import Results

MIB = 1024 * 1024


def test_all_rounds_are_made_within_the_limit() -> None:
    assert list(rounds_within(3, minutes=60)) == [0, 1, 2]


def test_no_round_begins_that_would_pass_the_limit_and_the_first_always_does() -> None:
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
