"""Processes that die, hang or are stopped, of which the client sees nothing.

The tests share a cluster whose ended processes are started again before each of them.
"""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from halfmoon_conductor.journal_file import main
from halfmoon_engine.fake_engine import FakeEngine, parse_fake_spec
from halfmoon_runtime.membership import MEMBERS
from halfmoon_scheduling.commands import Resubmit
from halfmoon_scheduling.conductor.journal import read_journal, replay_journal
from halfmoon_scheduling.events import KvChanged, RequestFinished, WorkerLost
from tests.e2e.conftest import LiveCluster, StartCluster, once

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ORACLE = FakeEngine(parse_fake_spec("fake://slow?max_context=8192"), block_size=64)
SHORT, LONG = list(range(300)), [i % 900 for i in range(4000)]
N_NEW = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def shared(start_cluster: StartCluster, folder: Path) -> Iterator[LiveCluster]:
    # A stream lasts for seconds after the few tokens that a test waits for: a worker that dies
    # after its last token proves nothing.
    lost = quote(str(folder / "lost"))
    model = f"fake://slow?step_s=0.02&max_context=8192&lost_by={lost}"
    extra = {
        "prefill": ["--chunk-tokens", "32", "--max-chunk-tokens", "32"],
        "conductor": ["--journal-path", str(folder / "journal"), "--placement", "min_ttft"],
    }
    with start_cluster(model, n_prefill=2, n_decode=2, n_kvstore=2, extra=extra) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: LiveCluster) -> LiveCluster:
    processes = shared.cluster.processes
    shared.restart(*(name for name, each in processes.items() if each.exit_code is not None))
    return shared


def stop(cluster: LiveCluster, *names: str, by: signal.Signals) -> None:
    """End processes, and check how they ended."""
    for name in names:
        cluster.process(name).signal(by)
    for name in names:
        assert cluster.process(name).wait(60), cluster.last_words()
        assert cluster.process(name).exit_code == (0 if by is signal.SIGTERM else -by), name


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_decode_that_is_killed_or_hangs_in_mid_stream_costs_no_token(
    cluster: LiveCluster, folder: Path, by: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the conductor's journal of it replays to the same commands."""
    victim, text = "", ""
    usage: dict[str, Any] = {}
    prompt = [int(by), *SHORT]
    ask = {"prompt": prompt, "max_tokens": N_NEW, "temperature": 0}
    events = list[object]()
    for event in cluster.events(**ask, stream_options={"include_usage": True}):
        events.append(event)
        usage = event.get("usage") or usage
        text += "".join(choice["text"] for choice in event.get("choices") or ())
        if len(events) == 10:
            victim = cluster.chosen("decode")
            cluster.process(victim).signal(by)
    assert text == "".join(f" t{token}" for token in ORACLE.expected(prompt, N_NEW))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (301, N_NEW)
    assert events[-1] == {"done": True}
    cluster.until(lambda: victim not in cluster.live())
    cluster.process(victim).signal(signal.SIGKILL)
    stop(cluster, "conductor-0", by=signal.SIGTERM)  # all of its journal is written then
    path = folder / "journal"
    with path.open("rb") as source:
        entries = list(read_journal(source)[1])
    kinds = {type(entry.event) for entry in entries}
    assert {WorkerLost, KvChanged, RequestFinished} <= kinds
    assert any(isinstance(command, Resubmit) for entry in entries for command in entry.commands)
    with path.open("rb") as source:
        assert replay_journal(source) == (len(entries), None)
    assert main([str(path)]) == 0
    assert f"{len(entries)} entries" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["is killed", "loses its engine"])
def test_a_prefill_that_ends_in_mid_prompt_costs_no_token(
    cluster: LiveCluster, folder: Path, how: str
) -> None:
    n_before = len(cluster.decisions())
    prompt = [int(how == "is killed"), *LONG]  # cached by no other test
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(cluster.stream, prompt, N_NEW)
        cluster.until(lambda: len(cluster.decisions()) > n_before)
        victim = cluster.chosen("prefill")
        if how == "is killed":
            stop(cluster, victim, by=signal.SIGKILL)
        else:
            lose_engine(cluster, folder, victim)
        assert answer.result(timeout=60) == ORACLE.expected(prompt, N_NEW)
    assert len(cluster.decisions()) == n_before + 2  # it was placed again


def lose_engine(cluster: LiveCluster, folder: Path, name: str) -> None:
    """Let an engine end; its worker leaves behind one line, a status, and no lease."""
    process = cluster.process(name)
    n_bytes = process.log_path.stat().st_size
    (folder / f"lost.{process.pid}").touch()
    cluster.until(lambda: process.exit_code is not None)
    there = httpx.get(cluster.metadata_url, params={"prefix": MEMBERS}, timeout=10).json()
    assert MEMBERS + name not in there and len(there) == 5
    assert process.exit_code == 1
    assert process.status["error"] == "EngineLost: a fake rank ended"
    lines = process.log_path.read_text()[n_bytes:].splitlines()
    said = [line for line in lines if "a fake rank ended" in line]
    assert len(said) == 2, lines  # what happened, and the stage that was reached
    assert not any("Traceback" in line for line in lines)


def test_an_engine_lost_while_its_worker_is_idle_is_noticed(
    cluster: LiveCluster, folder: Path
) -> None:
    lose_engine(cluster, folder, "decode-0")


# -- starts and stops ------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_workers_need_no_restart_when_the_embedded_metadata_server_starts_again(
    cluster: LiveCluster, by: signal.Signals
) -> None:
    def index_blocks() -> float:
        return cluster.metrics()["halfmoon_index_blocks"]

    def is_read_from_the_pool() -> bool:
        tokens, n_cached = cluster.ask(SHORT, 4)
        assert tokens == ORACLE.expected(SHORT, 4)
        return n_cached > 100

    cluster.until(is_read_from_the_pool)
    n_blocks = index_blocks()
    stop(cluster, "conductor-0", by=by)
    cluster.restart("conductor-0")
    # The kvstores have told what they hold. One that failed meanwhile is left out for 5 s.
    cluster.until(lambda: index_blocks() >= n_blocks)
    cluster.until(is_read_from_the_pool)


@pytest.mark.parametrize("told", ["the conductor", "all processes"])
def test_streams_longer_than_a_lease_end_well_whoever_is_told_to_stop(
    cluster: LiveCluster, told: str
) -> None:
    """As Ctrl-C has it, or a service manager that tells all; their signal may come twice."""
    n_new = 650
    names = list(cluster.cluster.processes) if told == "all processes" else ["conductor-0"]
    assert names[0] == "conductor-0", "the first to be told, as docs/operating.md advises"
    with ThreadPoolExecutor(2) as clients:
        begun = [threading.Event() for _ in range(2)]

        def ask(number: int) -> list[int]:
            return cluster.stream([number, 2, 3], n_new, once(2, begun[number].set))

        answers = [clients.submit(ask, number) for number in range(2)]
        assert all(each.wait(60) for each in begun)
        for name in names:
            cluster.process(name).signal(signal.SIGTERM)
        stop(cluster, *names, by=signal.SIGTERM)
        for number, answer in enumerate(answers):
            assert answer.result() == ORACLE.expected([number, 2, 3], n_new)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{cluster.url}/health", timeout=5)
