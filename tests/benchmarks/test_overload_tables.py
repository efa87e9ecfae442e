"""What the summary of a live overload says beside its goals."""

import io

import pytest
from rich.console import Console

from benchmarks.overload.__main__ import main
from benchmarks.overload.load import Calibration, OverloadRun
from benchmarks.overload.memory import MemorySamples
from benchmarks.overload.tables import LEARNT, LoadRuns, Margin, summary
from halfmoon_cli.bench.bench_record import BenchRecord, Slo

FOUND = Calibration(Slo(0.1, 0.01), served_per_s=10.0)


def a_record(at_s: float, ttft_s: float | None) -> BenchRecord:
    """One of 5 tokens with 10 ms between them, or one that was refused."""
    record = BenchRecord(0, at_s, 128, 5)
    if ttft_s is None:
        record.has_retry_after = True
        record.finish(at_s, "refused")
        return record
    for i in range(5):
        record.on_token(at_s + ttft_s + 0.01 * i)
    record.finish(at_s + ttft_s + 0.04, "finished")
    return record


def a_run(*records: BenchRecord, recovered_s: float = 1.0, grown: bool = False) -> OverloadRun:
    memory = MemorySamples({"prefill-0": 1})
    memory.samples["prefill-0"] = [100.0] * 4 + [200.0 if grown else 100.0] * 4
    return OverloadRun(list(records), 100.0, 60.0, memory, recovered_s)


def shown(run: OverloadRun, *fixed: OverloadRun) -> str:
    others = [(Margin.fixed(0.8), one) for one in fixed]
    load = LoadRuns(2.0, FOUND, [(LEARNT, run), *others])
    console = Console(file=io.StringIO(), width=250)
    console.print(summary([load]))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_that_keeps_all_goals_has_no_mark() -> None:
    run = a_run(*(a_record(100.0 + i, 0.5) for i in range(9)), a_record(109.0, None))
    text = shown(run, a_run(*(a_record(100.0, 0.5) for _ in range(9))))
    assert "NO" not in text
    for part in ("2× (20.0/s)", "100.0%", "1.00", "1 of 1", "1.00 s"):
        assert part in text


def test_each_missed_goal_is_marked() -> None:
    late = [a_record(100.0, 1.5) for _ in range(2)]
    refused = a_record(109.0, None)
    refused.has_retry_after = False
    good = [a_record(100.0, 0.5) for _ in range(8)]
    run = a_run(*good, *late, refused, recovered_s=2.5, grown=True)
    text = shown(run, a_run(*(a_record(100.0, 0.5) for _ in range(16))))
    for part in ("NO: 80.0%", "NO: 0.50", "NO: 0 of 1", "NO: prefill-0 grew", "NO: 2.50 s"):
        assert part in text


@pytest.mark.parametrize("share", ["0", "1.5", "-0.2"])
def test_a_fixed_share_outside_its_range_is_refused_with_the_way_out(
    share: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["overload", f"--fixed={share}"])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert f"--fixed has {share}" in said and "no margin is 1" in said
