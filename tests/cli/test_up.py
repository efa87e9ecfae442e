"""`halfmoon up` as a user runs it: what it prints, and what it leaves behind."""

import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from halfmoon_cli.__main__ import app
from halfmoon_cli.up import foreground, up_command
from halfmoon_cli.up.default_limits import default_limits
from halfmoon_cli.up.embedded_cluster import ClusterPlan, plan_processes
from halfmoon_cli.up.foreground import status_table
from halfmoon_cli.up.restart_policy import MAX_DEATHS, WINDOW_S, RestartPolicy
from halfmoon_cli.up.worker_threads import worker_threads
from halfmoon_metadata.tcp_ports import free_port, is_free
from halfmoon_runtime.lifecycle import SAME_SIGNAL_S
from halfmoon_runtime.observability.operator_tokens import operator_token
from halfmoon_sandbox.bound_process import start_bound

FAKE = "fake://tiny?step_s=0.001"


class Up:
    """A running `halfmoon up` and what it has printed; unless told, its engines measure nothing."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        self.output = folder / "output"
        self.url = ""
        with self.output.open("wb") as sink:
            self.process = start_bound(
                [sys.executable, "-m", "halfmoon_cli", "up", *words],
                env={**os.environ, "COLUMNS": "300", "HALFMOON_MEASURE": "false", **environment},
                cwd=folder,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def until(self, condition: Callable[[], bool], within_s: float = 120) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def stop(self, by: signal.Signals = signal.SIGINT) -> None:
        """End it, and check that what a service forks ends with it, a moment later."""
        children = self.children()
        self.process.send_signal(by)
        assert self.process.wait(60) == 0, self.text
        self.until(lambda: not any(child.is_running() for child in children))

    def children(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in found if any("halfmoon_" in word for word in child.cmdline())]


def kept_key(folder: Path) -> str:
    """The key of the cluster that was started in a folder."""
    return (folder / ".halfmoon/up/cluster-key").read_text().strip()


@contextmanager
def up(folder: Path, *words: str, **environment: str) -> Iterator[Up]:
    """One that is ready, of a fake model unless told otherwise."""
    port = free_port()
    running = Up(folder, *words, **{"MODEL": FAKE, "PORT": str(port), **environment})
    running.url = f"http://127.0.0.1:{port}"
    try:
        running.until(lambda: "Ctrl-C stops it" in running.text)
        yield running
    finally:
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(60)


def debug(running: Up, key: str = "") -> httpx.Response:
    shown = {"authorization": f"Bearer {operator_token(key)}"} if key else {}
    return httpx.get(f"{running.url}/debug/cluster", timeout=20, headers=shown)


@pytest.mark.usefixtures("started_programs")
@pytest.mark.e2e
def test_up_prints_a_curl_line_that_works_keeps_its_port_and_stops_everything_on_ctrl_c(
    tmp_path: Path,
) -> None:
    with up(tmp_path, PREFILL="2", HALFMOON_MEASURE="true") as running:
        line = next(part for part in running.text.splitlines() if part.startswith("curl "))
        answer = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True)
        assert '"usage"' in answer.stdout, answer.stdout
        assert "max-queued-requests 256, max-queue-s 60" in running.text
        assert "--no-limits" in running.text
        assert re.search(r"prefill: 2 workers × \S+ tokens; longest request 4,096", running.text)
        assert "decode: 1 worker ×" in running.text
        commands = [child.cmdline() for child in running.children()]
        assert sum("halfmoon_sandbox.template_process" not in each for each in commands) == 5
        # Another one is refused the port, with the process to stop.
        port = running.url.rpartition(":")[2]
        words = ["up", "--model", FAKE, "--port", port, "--state", str(tmp_path / "second")]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        assert "halfmoon_conductor" in result.output
        assert f"stop that Halfmoon with `kill {running.process.pid}`" in result.output
        running.stop()


@pytest.mark.e2e
@pytest.mark.parametrize("n_signals", [1, 2])
def test_ctrl_c_lets_streams_end_and_a_second_one_does_not(tmp_path: Path, n_signals: int) -> None:
    begun = threading.Event()

    def ask(url: str) -> str:
        n = 30 if n_signals == 1 else 300  # it ends by itself; or not before the second signal
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": n, "stream": True}
        last = ""
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            try:
                for line in filter(None, answer.iter_lines()):
                    last = line
                    begun.set()
            except httpx.TransportError as error:
                last = type(error).__name__
        return last

    with up(tmp_path, MODEL="fake://tiny?step_s=0.1") as running, ThreadPoolExecutor(1) as client:
        asked = client.submit(ask, running.url)
        assert begun.wait(60)
        running.process.send_signal(signal.SIGINT)
        running.until(lambda: "30 s to end" in running.text)
        if n_signals == 2:
            time.sleep(SAME_SIGNAL_S)
            running.process.send_signal(signal.SIGINT)
        assert (asked.result() == "data: [DONE]") == (n_signals == 1)
        assert running.process.wait(60) == 0


@pytest.mark.e2e
def test_up_warns_of_what_will_not_be_as_it_was_meant_with_the_way_out_and_uses_a_given_key(
    tmp_path: Path,
) -> None:
    model = "fake://?layers=16&kv_heads=8&head_dim=64&max_context=131072"
    key = "an environment's own key"
    environment = {"HALFMOON_CHUNK_TOKEN": "64", "HALFMOON_CLUSTER_KEY": key}
    words = ("-o", "decode.pool-mib=64", "--flexible")
    with up(tmp_path, *words, MODEL=model, **environment) as running:
        assert "decode: 1 worker × 1,024 tokens; longest request 1,024" in running.text
        assert "longer requests are refused" in running.text
        assert "-o decode.pool-mib=8192" in running.text
        assert "--flexible changes nothing" in running.text
        assert debug(running, key).json()["scheduling"]["role_changes"] is True
        told = "HALFMOON_CHUNK_TOKEN is no setting: did you mean HALFMOON_CHUNK_TOKENS?"
        # Prefill and decode workers both say so.
        assert running.text.count(told) == running.text.count("HALFMOON_CHUNK_TOKEN ") == 1
        assert not (tmp_path / ".halfmoon/up/cluster-key").exists()
        assert (debug(running).status_code, debug(running, key).status_code) == (401, 200)
        running.stop()


@pytest.mark.usefixtures("started_programs")
@pytest.mark.e2e
@pytest.mark.parametrize("ready", [True, False], ids=["ready", "while they start"])
def test_services_end_with_up_even_if_it_is_killed(tmp_path: Path, ready: bool) -> None:
    running = Up(tmp_path, MODEL=FAKE, PORT=str(free_port()))
    running.until(lambda: len(running.children()) >= 4)
    if ready:
        running.until(lambda: "Ctrl-C stops it" in running.text)
    children = running.children()
    if ready:  # one that stands still can't notice by itself that its parent is gone
        children[0].suspend()
    running.process.kill()
    running.process.wait(60)
    assert len(children) >= 4 and not psutil.wait_procs(children, 60)[1]


@pytest.mark.e2e
def test_a_closed_terminal_stops_everything_in_order_and_a_cluster_without_a_key_says_so(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, inherited))
    with up(tmp_path, "--no-cluster-key") as running:
        assert "The cluster has no key" in running.text and "#token" not in running.text
        assert not (tmp_path / ".halfmoon/up/cluster-key").exists()
        assert debug(running).status_code == 200
        running.stop(signal.SIGHUP)
        assert "stopping" in running.text


def halfmoon(folder: Path, *words: str) -> tuple[int, str]:
    """Run a command as a user does in a folder, without a key; return its status and output."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HALFMOON_CLUSTER_KEY")}
    command = [sys.executable, "-m", "halfmoon_cli", *words]
    with TemporaryFile("w+") as shown, TemporaryFile() as errors:
        status = start_bound(
            command, cwd=folder, env=environment, stdout=shown, stderr=errors
        ).wait(60)
        shown.seek(0)
        return status, shown.read()


@pytest.mark.e2e
def test_a_key_is_made_once_and_kept_for_the_user_alone_and_no_stranger_gets_in(
    tmp_path: Path,
) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    keys = []
    for is_new in (True, False):
        with up(tmp_path) as running:
            url = running.url
            keys.append(kept_key(tmp_path))
            if not is_new:
                break
            file = tmp_path / ".halfmoon/up/cluster-key"
            assert file.stat().st_mode & 0o777 == 0o600
            assert str(file) in running.text and keys[0] not in running.text
            ready = json.loads((tmp_path / ".halfmoon/up/conductor-0.status.json").read_text())
            for asked in (f"{url}/debug/cluster", f"{ready['metadata']}?prefix=halfmoon"):
                assert httpx.get(asked).status_code == 401
            for method in ("GET", "PUT", "POST", "DELETE"):  # it has a port of its own alone
                assert httpx.request(method, f"{url}/metadata?prefix=halfmoon").status_code == 404
            page = re.search(r"http\S+/#token=(\w+)", running.text)
            assert page is not None
            shown = {"authorization": f"Bearer {page[1]}"}
            assert httpx.get(f"{url}/debug/cluster", headers=shown).status_code == 200
            status = ("status", "--url", url, "--json")
            assert "prefill-0" in halfmoon(tmp_path, *status)[1]
            nodes = ("kv", "ls", "--metadata", ready["metadata"])
            assert "kvstore-0" in halfmoon(tmp_path, *nodes)[1]
            assert halfmoon(tmp_path, "operator-token")[1].strip() == page[1]
            for words in (status, nodes, ("operator-token",)):
                assert halfmoon(elsewhere, *words)[0] != 0
        # No cluster runs with it: other clusters are asked without it.
        assert halfmoon(tmp_path, "operator-token")[0] == 2
    assert keys[0] == keys[1] and len(keys[0]) == 64


@pytest.mark.parametrize(
    ("content", "mode", "told"), [("a" * 64, 0o644, "chmod 600"), ("", 0o600, "is empty")]
)
def test_a_kept_key_that_can_not_be_used_is_refused_before_anything_starts(
    tmp_path: Path, content: str, mode: int, told: str
) -> None:
    (file := tmp_path / "cluster-key").write_text(content)
    file.chmod(mode)
    words = ["up", "--model", FAKE, "--state", str(tmp_path)]
    result = CliRunner().invoke(app, words, env={"HALFMOON_CLUSTER_KEY": ""})
    assert result.exit_code == 2
    assert str(file) in result.output.replace("\n", "") and told in result.output


@pytest.mark.usefixtures("started_programs")
@pytest.mark.e2e
def test_a_service_that_dies_is_started_again_until_it_dies_too_often(tmp_path: Path) -> None:
    with up(tmp_path) as running:
        body = {"model": "tiny", "prompt": [1, 2], "max_tokens": 3}

        def answers() -> bool:
            answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=20)
            return answer.status_code == 200

        told = "conductor-0 was ended by SIGKILL"
        for n in range(1, MAX_DEATHS + 1):
            victims: list[psutil.Process] = []

            def found(victims: list[psutil.Process] = victims) -> bool:
                # The name is not there for a moment: a process has no command while it starts one.
                victims[:] = [c for c in running.children() if "conductor-0" in c.cmdline()]
                return bool(victims)

            running.until(found)
            victims[0].kill()
            running.until(lambda n=n: running.text.count(told) == n)  # type: ignore[misc]
            if n == 1:
                running.until(lambda: "conductor-0 is ready again" in running.text)
                lines = (tmp_path / ".halfmoon/up/conductor-0.log").read_text().splitlines()
                (_, second) = (
                    n for n, line in enumerate(lines) if re.search(r"\] starting ", line)
                )
                shown = " ".join(running.text.split())
                assert " ".join(lines[second - 1].split()) in shown, "its last log lines are shown"
                running.until(answers)
        assert running.process.wait(60) == 1
        assert f"conductor-0 stays stopped: it ended {MAX_DEATHS} times" in running.text


def test_pauses_grow_until_a_service_stays_stopped_and_begin_anew_after_a_quiet_minute() -> None:
    policy = RestartPolicy()
    assert [policy.pause_after_death("a", float(n)) for n in range(5)] == [0.5, 1, 2, 4, None]
    assert policy.pause_after_death("b", 5.0) == 0.5
    assert policy.pause_after_death("a", 4.0 + WINDOW_S) == 0.5


@pytest.mark.e2e
def test_a_cluster_with_tenants_starts_and_shows_a_line_that_works_with_a_key(
    tmp_path: Path,
) -> None:
    hashed = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"  # of "foo"
    tenant = f'[[tenants]]\nname = "lab"\nkey_sha256 = ["{hashed}"]\n'
    (tmp_path / "tenants.toml").write_text(tenant)
    words = ("-o", "conductor.tenants=tenants.toml", "-o", "prefill.measure=false")
    with up(tmp_path, *words) as running:
        [line] = [each for each in running.text.splitlines() if each.startswith("curl ")]
        for key in ("foo", ""):
            environment = {**os.environ, "OPENAI_API_KEY": key}
            answer = subprocess.run(
                line, shell=True, capture_output=True, text=True, env=environment, check=bool(key)
            )
            assert ('"usage"' in answer.stdout) == bool(key), answer.stdout
        running.stop(signal.SIGTERM)


@pytest.mark.e2e
def test_an_unknown_flag_is_named_and_nothing_stays_behind(tmp_path: Path) -> None:
    environment = {"MODEL": FAKE, "PORT": str(free_port())}
    running = Up(tmp_path, "-o", "decode.max-runing=3", **environment)
    children = psutil.Process(running.process.pid).children
    assert running.process.wait(60) == 1
    assert "--max-runing is no flag: did you mean --max-running?" in running.text
    assert "decode-0 ended with status 2" in running.text
    with pytest.raises(psutil.NoSuchProcess):
        children()


@pytest.mark.parametrize("command", ["up", "route"])
def test_a_port_in_use_is_refused_with_what_holds_it_and_the_ways_out(command: str) -> None:
    words = ["--model", FAKE] if command == "up" else ["--worker", "http://127.0.0.1:1"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, [command, *words, "--port", str(port)])
    assert result.exit_code == 2
    assert f"port {port} is in use by process {os.getpid()} (" in result.output
    way = re.search(r"choose another port with --port ([0-9]+)", result.output)
    assert way and is_free(int(way[1]))
    assert (f"make up PORT={way[1]}" in result.output) == (command == "up")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://:secret@127.0.0.1:{port}/0", "redis://127.0.0.1:{port}/0: Error 111"),
        ("etcd://user:secret@127.0.0.1:{port}", "etcd://127.0.0.1:{port}: "),
        ("http://127.0.0.1:{port}/metadata", "http://127.0.0.1:{port}/metadata: "),
        ("reddis://:secret@127.0.0.1:{port}", "'reddis://…@127.0.0.1:{port}' has no known scheme"),
        ("memory://here", "'memory://here': each process would have a store of its own"),
    ],
)
def test_a_metadata_server_where_services_can_not_meet_is_refused_before_any_starts(
    tmp_path: Path, url: str, told: str
) -> None:
    port = free_port()
    words = ["up", "--model", FAKE, "--state", str(tmp_path), "--metadata", url.format(port=port)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert result.exit_code == 2
    (line,) = result.output.strip().splitlines()
    assert told.format(port=port) in line and "secret" not in line
    assert "--metadata names another, and without it the conductor serves one itself" in line
    assert not list(tmp_path.glob("*.log"))


def test_members_of_a_group_can_not_be_flexible_and_are_refused_by_name() -> None:
    words = ["up", "--model", FAKE, "--prefill", "2", "--group", "2", "--flexible"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "--flexible with --group 2" in result.output and "leave one" in result.output


@pytest.mark.parametrize("option", ["prefill", "prefill.x", "master.x=1"])
def test_an_option_of_another_form_is_refused_naming_it(option: str) -> None:
    result = CliRunner().invoke(app, ["up", "--model", FAKE, "-o", option])
    assert result.exit_code == 2
    assert option in result.output and "ROLE.FLAG=VALUE" in result.output


def test_a_narrow_terminal_cuts_no_address() -> None:
    conductor: Any = SimpleNamespace(
        exit_code=None, stage="ready", status={"metadata": "http://127.0.0.1:7999/metadata"}
    )
    screen = io.StringIO()
    Console(file=screen, width=40).print(status_table({"conductor-0": conductor}, 3.0))
    shown = re.sub(r"\s", "", screen.getvalue())
    assert "conductor-0ready" in shown
    assert "metadata=http://127.0.0.1:7999/metadata" in shown


def test_limits_reach_the_conductor_alone_and_those_of_the_user_stay() -> None:
    plan = ClusterPlan(model="m", http_port=1, limits=default_limits((), {}))
    limited = {s.name: [a for a in s.arguments if "queue" in a] for s in plan_processes(plan)}
    assert limited.pop("conductor-0") == ["--max-queued-requests=256", "--max-queue-s=60"]
    assert not any(limited.values())
    assert set(default_limits(("--max-queue-s=5",), {})) == {"max-queued-requests"}
    environment = {"HALFMOON_MAX_QUEUED_REQUESTS": "9"}
    assert set(default_limits((), environment)) == {"max-queue-s"}


def test_prefill_workers_share_the_kvstores_in_turn() -> None:
    plan = ClusterPlan(model="m", http_port=1, n_prefill=3, n_kvstore=2)
    homes = [
        spec.arguments[spec.arguments.index("--home-kvstore") + 1]
        for spec in plan_processes(plan)
        if spec.role == "prefill"
    ]
    assert homes == ["kvstore-0", "kvstore-1", "kvstore-0"]


def test_only_workers_with_a_model_run_in_an_environment_of_their_own() -> None:
    plan = ClusterPlan(model="m", http_port=1, worker_python="/venv/bin/python")
    own = {spec.role for spec in plan_processes(plan) if spec.python == "/venv/bin/python"}
    assert own == {"prefill", "decode"}


@pytest.mark.parametrize(
    ("n_cores", "n_workers", "threads", "alone"),
    [
        (1, 1, 1, 1),
        (2, 2, 2, 1),
        (2, 4, 1, 1),
        (2, 9, 1, 1),
        (8, 2, 8, 4),
        (8, 3, 5, 2),
        (8, 4, 4, 2),
        (64, 1, 64, 64),
        (4, 0, 4, 4),
    ],
)
def test_workers_share_the_cores_of_a_machine(
    n_cores: int, n_workers: int, threads: int, alone: int
) -> None:
    shared = worker_threads(n_cores, n_workers, 0)
    assert shared == worker_threads(n_cores, 0, n_workers)
    assert shared == {"prefill": threads, "decode": threads}
    by_vllm = worker_threads(n_cores, 0, n_workers, "vllm")
    assert by_vllm == {"prefill": threads, "decode": alone}


def test_threads_reach_the_workers_that_compute_unless_a_role_has_its_own() -> None:
    def threads(**changes: Any) -> dict[str, str]:
        plan = ClusterPlan(model="m", http_port=1, **changes)
        return {
            spec.name: argument
            for spec in plan_processes(plan)
            for flag, argument in pairwise(spec.arguments)
            if flag == "--threads"
        }

    assert threads() == {}
    two = {"prefill": 2, "decode": 2}
    assert threads(threads=two, n_decode=2) == {"prefill-0": "2", "decode-0": "2", "decode-1": "2"}
    assert threads(threads=two, extra={"decode": ["--threads=1"]}) == {"prefill-0": "2"}


@pytest.mark.parametrize("chosen", ["", "3"])
def test_up_counts_the_cores_unless_the_environment_sets_threads(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[ClusterPlan] = []

    def run(plan: ClusterPlan, *_: object, **__: object) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(foreground, "run_up", run)
    monkeypatch.setattr(up_command, "machine_cores", lambda: 8)
    monkeypatch.setenv("HALFMOON_THREADS", chosen)
    if not chosen:
        monkeypatch.delenv("HALFMOON_THREADS")
    result = CliRunner().invoke(app, ["up", "--model", FAKE, "--prefill", "2", "--decode", "2"])
    assert result.exit_code == 0
    assert plans[0].threads == ({} if chosen else {"prefill": 4, "decode": 4})
