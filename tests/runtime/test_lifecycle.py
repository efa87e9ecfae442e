"""Services as processes: how they start, stop, fail, and what they leave behind."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from halfmoon_runtime.healthcheck import STATUS_FILE
from halfmoon_runtime.lifecycle import report_stage
from halfmoon_sandbox.bound_process import start_bound

PRELUDE = """
import asyncio, os, sys, time
from halfmoon_runtime.lifecycle import run_service
from halfmoon_runtime.settings import ServiceSettings

METRICS_PORT = -1

async def forever():
    try:
        await asyncio.Event().wait()
    finally:
        print("spawned task ended", flush=True)

async def fail(error):
    raise error

"""
EPILOGUE = """
settings = ServiceSettings(worker_id="bakery-0", log_format="json", metrics_port=METRICS_PORT)
run_service("bakery", settings, main)
"""


#: A variable of every service's environment that is no setting.
MISSPELT = {"HALFMOON_METADTA": "redis://here"}
MEANT = {"HALFMOON_METADTA": "HALFMOON_METADATA"}


class Running:
    """A service in a process of its own."""

    def __init__(self, body: str, folder: Path) -> None:
        self._status = folder / "status.json"
        self._log = (folder / "log").open("w+")
        self._printed = folder / "printed"
        program = folder / "service.py"
        program.write_text(PRELUDE + body + EPILOGUE)
        with self._printed.open("w") as printed:
            self.process = start_bound(
                [sys.executable, program],
                stdout=printed,
                stderr=self._log,
                env={
                    **os.environ,
                    **MISSPELT,
                    STATUS_FILE: str(self._status),
                    "PYTHONUNBUFFERED": "1",
                },
            )

    @property
    def status(self) -> dict[str, Any]:
        if not self._status.exists():
            return {}
        status: dict[str, Any] = json.loads(self._status.read_text())
        return status

    def until_stage(self, stage: str) -> None:
        deadline = time.monotonic() + 20
        while self.status.get("stage") != stage:
            assert time.monotonic() < deadline, (stage, self.status, self.log)
            time.sleep(0.005)

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.splitlines()]

    def end(self) -> tuple[int, str]:
        """Wait; the exit status and what it printed."""
        code = self.process.wait(timeout=20)
        return code, self._printed.read_text()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


#: Starts a service with this body.
Start = Callable[[str], Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Running] = []

    def begin(body: str) -> Running:
        running.append(Running(body, tmp_path))
        return running[-1]

    yield begin
    for one in running:
        one.stop()


SERVING = """
async def main(service):
    service.spawn(forever())
    service.ready()
    assert service.is_ready
    service.report_stage("ready", worker_id="bakery-0", url="http://here")
    await service.stopping.wait()
    assert not service.is_ready
    service.report_stage("draining")
    await asyncio.sleep(0.1)
    print("drained", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_main_finish_what_it_has(start: Start, number: signal.Signals) -> None:
    running = start(SERVING)
    running.until_stage("ready")
    assert running.status == {
        "stage": "ready", "pid": running.process.pid, "worker_id": "bakery-0", "url": "http://here",
        "misspelt": MEANT,
    }  # fmt: skip
    running.process.send_signal(number)
    code, printed = running.end()
    assert code == 0, running.log
    assert printed.split("\n")[:2] == ["drained", "spawned task ended"]
    assert (running.status["stage"], running.status["misspelt"]) == ("stopped", MEANT)


def test_an_exit_waits_for_no_thread_and_no_clean_up_of_the_interpreter(start: Start) -> None:
    running = start("""
import atexit, threading

never = threading.Event()
atexit.register(never.wait)

async def main(service):
    asyncio.ensure_future(asyncio.to_thread(never.wait))
    threading.Thread(target=never.wait).start()
    service.ready()
    service.report_stage("ready")
    await service.stopping.wait()
    print("closed")
    sys.stderr.write("last words")
""")
    running.until_stage("ready")
    running.process.send_signal(signal.SIGTERM)
    code, printed = running.end()
    assert code == 0, running.log
    assert printed == "closed\n"
    assert "last words" in running.log
    assert running.status["stage"] == "stopped"


@pytest.mark.usefixtures("started_programs")  # what a fork begins with is out of sight already
def test_what_is_there_once_a_service_is_ready_and_what_is_young_is_not_looked_at(
    start: Start,
) -> None:
    running = start("""
import gc
from halfmoon_runtime.gc_tuning import YOUNG_OBJECTS

def n_looks():
    return sum(generation["collections"] for generation in gc.get_stats())

async def main(service):
    assert not gc.get_freeze_count()
    service.ready()
    print(gc.get_freeze_count() > 1000)
    before = n_looks()
    kept = [[] for _ in range(YOUNG_OBJECTS // 2)]
    print(n_looks() == before)
    kept += [[] for _ in range(YOUNG_OBJECTS)]
    print(n_looks() > before)
""")
    code, printed = running.end()
    assert (code, printed) == (0, "True\n" * 3), running.log


def test_a_service_runs_on_uvloop_and_is_done_when_its_main_returns(start: Start) -> None:
    running = start("""
async def main(service):
    print(type(asyncio.get_running_loop()).__module__)
    service.spawn(forever())
    await asyncio.sleep(0)
""")
    assert running.end() == (0, "uvloop\nspawned task ended\n")


@pytest.mark.parametrize(
    "body",
    [
        "async def main(service):\n    raise ValueError('no flour')",
        "async def main(service):\n"
        "    service.spawn(forever())\n"
        "    service.spawn(fail(ValueError('no flour')))\n"
        "    service.ready()\n"
        "    await service.stopping.wait()",
        "async def main(service):\n"
        "    service.spawn(fail(ValueError('no flour')))\n"
        "    await asyncio.to_thread(time.sleep, 1000)",
    ],
    ids=["main", "a task", "a task while a thread works"],
)
def test_a_failure_ends_the_service_with_a_traceback(start: Start, body: str) -> None:
    running = start(body)
    code, _ = running.end()
    assert code == 1
    assert running.status["stage"] == "failed"
    assert running.status["error"] == "ValueError: no flour"
    assert running.status["misspelt"] == MEANT
    failed = [line for line in running.lines if "exception" in line]
    assert len(failed) == 1
    assert "Traceback" in failed[0]["exception"]
    assert "ValueError: no flour" in failed[0]["exception"]


def test_what_is_refused_ends_the_service_with_one_line(start: Start) -> None:
    running = start("""
from halfmoon_runtime.lifecycle import CannotStart
async def main(service):
    raise CannotStart('no flour: buy some') from ValueError('deep')
""")
    assert running.end()[0] == 2
    assert running.status["stage"] == "failed"
    assert (running.status["error"], running.status["refused"]) == ("no flour: buy some", True)
    assert running.status["misspelt"] == MEANT
    said = [line["error"] for line in running.lines if "error" in line]
    assert said == ["no flour: buy some"]
    assert "Traceback" not in running.log and "deep" not in running.log


def test_a_worker_whose_name_is_taken_over_ends_with_one_line(start: Start) -> None:
    running = start("""
from halfmoon_runtime.membership import Superseded
async def main(service):
    service.ready()
    service.spawn(fail(Superseded('generation 2 runs at tcp://there:1')))
    await asyncio.Event().wait()
""")
    assert running.end()[0] == 1
    assert running.status["stage"] == "failed"
    assert "exception" not in running.log and "Traceback" not in running.log
    assert running.log.count('"event": "superseded"') == 1


@pytest.mark.parametrize("stopping", [False, True])
def test_what_is_lost_ends_it_with_one_line_even_while_it_stops(
    start: Start, stopping: bool
) -> None:
    running = start(f"""
class Lost(RuntimeError):
    pass

async def main(service):
    service.ready()
    if {stopping}:
        service.report_stage("ready")
        await service.stopping.wait()
    # Two tasks have noticed it.
    service.spawn(fail(ExceptionGroup("tasks", [Lost("rank 1 ended"), Lost("rank 1 ended")])))
    await asyncio.Event().wait()

run_service_as_given = run_service
def run_service(*arguments):
    run_service_as_given(*arguments, lost=Lost)
""")
    if stopping:
        running.until_stage("ready")
        running.process.send_signal(signal.SIGTERM)
    code, _ = running.end()
    assert code == 1
    assert (running.status["stage"], running.status["error"]) == ("failed", "Lost: rank 1 ended")
    said = [line for line in running.lines if line["event"] == "lost"]
    assert [line["error"] for line in said] == ["rank 1 ended"]
    assert "Traceback" not in running.log


def test_a_failure_while_stopping_is_logged_and_does_not_undo_the_stop(start: Start) -> None:
    running = start("""
async def main(service):
    service.ready()
    service.report_stage("ready")
    await service.stopping.wait()
    service.spawn(fail(ValueError("socket closed")))
    await asyncio.sleep(0.1)
    print("drained", flush=True)
""")
    running.until_stage("ready")
    running.process.terminate()
    code, printed = running.end()
    assert code == 0
    assert "drained" in printed
    assert "socket closed" in running.log


def test_a_signal_while_starting_ends_the_start_even_in_a_thread(start: Start) -> None:
    running = start("""
async def main(service):
    try:
        service.report_stage("loading")
        await asyncio.to_thread(time.sleep, 1000)
    finally:
        print("cleaned up", flush=True)
""")
    running.until_stage("loading")
    running.process.terminate()
    code, printed = running.end()
    assert code == 0
    assert "cleaned up" in printed


#: Seconds within which further signals say nothing new: none, or all.
EACH_COUNTS, NONE_MORE_COUNTS = (
    f"import halfmoon_runtime.lifecycle\nhalfmoon_runtime.lifecycle.SAME_SIGNAL_S = {seconds}\n"
    for seconds in (0.0, 1e6)
)
SLOW = """
import signal
async def main(service):
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGUSR1, lambda: service.report_stage("asked")
    )
    service.ready()
    service.report_stage("ready")
    await service.stopping.wait()
    service.report_stage("draining")
    try:
        await asyncio.sleep(1000)
    finally:
        print("cleaned up", flush=True)
        service.report_stage("cleaning")
        if STUBBORN:
            await asyncio.sleep(1000)
"""


@pytest.fixture
def draining(start: Start) -> Start:
    """Starts a slow service, after lines of its own, and has it drain."""

    def begin(before: str) -> Running:
        running = start(before + SLOW)
        running.until_stage("ready")
        running.process.terminate()
        running.until_stage("draining")
        return running

    return begin


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_second_signal_cuts_the_drain_short_and_a_third_one_ends_it_at_once(
    draining: Start, stubborn: bool
) -> None:
    running = draining(f"STUBBORN = {stubborn}\n{EACH_COUNTS}")
    running.process.send_signal(signal.SIGINT)
    if stubborn:
        running.until_stage("cleaning")
        running.process.send_signal(signal.SIGINT)
    code, printed = running.end()
    assert code == 128 + signal.SIGINT
    assert "cleaned up" in printed


def test_signals_within_a_second_are_one(draining: Start) -> None:
    """As where a service manager signals all processes, and the leader passes its own on."""
    running = draining("STUBBORN = False\n" + NONE_MORE_COUNTS)
    for _ in range(3):
        running.process.terminate()
    running.process.send_signal(signal.SIGUSR1)  # signals are handled in their order
    running.until_stage("asked")
    assert running.process.poll() is None
    running.process.kill()
    assert "cleaned up" not in running.end()[1]


def test_an_unwritable_status_file_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATUS_FILE, str(tmp_path / "no such folder" / "status"))
    report_stage("ready")
    monkeypatch.setenv(STATUS_FILE, str(tmp_path / "status"))
    report_stage("ready", where=tmp_path)
    assert json.loads((tmp_path / "status").read_text())["where"] == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["status"]
