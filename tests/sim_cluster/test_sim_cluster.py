"""The simulation of a cluster: what it holds, that it repeats itself, and what it finds."""

import os
import random
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from greenlet import greenlet

from halfmoon_testing.sim_cluster.__main__ import main
from halfmoon_testing.sim_cluster.sim_run import SimResult, run_seed
from halfmoon_testing.sim_cluster.sim_shape import draw_shape
from tests.nightly import by_day
from tests.sim_cluster.machine_clock import clock_reads
from tests.sim_cluster.planted_bugs import BUGS, PlantedBug

#: Seeds of the short search.
N_SEEDS = int(os.environ.get("HALFMOON_SIM_SEEDS", by_day(16, at_night=200)))
PAGE = Path(__file__).resolve().parents[2] / "docs" / "sim-cluster.md"


@cache
def sound_run(seed: int) -> SimResult:
    """Run a seed without a planted bug."""
    return run_seed(seed)


def test_the_promises_hold_in_some_seeds() -> None:
    faults: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for seed in range(N_SEEDS):
        result = sound_run(seed)
        assert result.violation is None, f"seed {seed}: {result.violation}"
        faults += result.faults
        ends += result.ends
    assert len(faults) > 10 and ends["ok"] > N_SEEDS
    assert faults["disk is slow"]


def test_a_seed_repeats_itself_to_the_byte_in_another_process() -> None:
    log = "\n".join(run_seed(17, with_log=True).log)
    again = subprocess.run(
        [sys.executable, "-m", "halfmoon_testing.sim_cluster", "--seed", "17", "--log"],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert again.stdout.startswith(log + "\n")
    assert log.count("\n") > 100


def test_a_run_uses_no_thread_no_socket_and_no_clock_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = {seed: draw_shape(random.Random(f"{seed}/shape")) for seed in range(100)}
    group = next(seed for seed, shape in shapes.items() if shape.is_group)
    local = next(seed for seed, shape in shapes.items() if shape.local_prefill_tokens > 100)
    seeds = (3, 15, group, local)
    for seed in seeds:
        run_seed(seed)  # imports are over
    used = []

    def refuse(*args: object, **more: object) -> None:
        used.append(traceback.format_stack())
        raise AssertionError("the machine's threads, sockets and clock are out of bounds")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(time, "sleep", refuse)
    with clock_reads() as reads:
        results = [run_seed(seed) for seed in seeds]
    assert all(result.violation is None for result in results)
    assert reads == set() and not used, "".join(used[0])


def test_clocks_of_the_machine_are_noticed_also_in_defaults_and_in_threads() -> None:
    ours: dict[str, Any] = {"__name__": "halfmoon_ours", "time": time}
    exec(
        "def by_default(now=time.monotonic): return now()\n"
        "def in_thread(): return time.time()\n"
        "def harmless(): return time.gmtime(0)",
        ours,
    )
    with clock_reads() as reads:
        time.monotonic()
        ours["harmless"]()
        assert reads == set()
        ours["by_default"]()
        greenlet(ours["in_thread"]).switch()
    assert reads == {
        "halfmoon_ours:by_default reads time.monotonic",
        "halfmoon_ours:in_thread reads time.time",
    }


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_planted_bug_is_found(bug: PlantedBug) -> None:
    assert sound_run(bug.seed).violation is None
    with bug.planted():
        violation = run_seed(bug.seed).violation
    assert violation is not None and violation.invariant == bug.breaks, (
        f"seed {bug.seed} gives {violation}; if draws have changed, find the seed anew by"
        " `python -m tests.sim_cluster.planted_bugs`"
    )


def test_each_promise_of_the_page_is_broken_by_a_planted_bug() -> None:
    table = PAGE.read_text().partition("| invariant |")[2].partition("\n\n")[0]
    promises = {line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]}
    assert len(promises) > 10
    assert promises == {bug.breaks for bug in BUGS.values()}


def test_the_command_shows_a_violation_and_how_to_repeat_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bug = BUGS["block hashes are without the salt"]
    with bug.planted():
        assert main(["--seeds", f"{bug.seed}:{bug.seed + 1}"]) == 1
    shown = capsys.readouterr().out
    assert f"seed {bug.seed}: no hit across salts" in shown
    assert f"halfmoon sim-cluster --seed {bug.seed} --log" in shown
    assert "violated" in shown


def test_seeds_are_first_and_end(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--seeds", "5"])
    assert "'5' is not FIRST:END" in capsys.readouterr().err
