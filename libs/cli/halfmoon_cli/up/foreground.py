"""Run an embedded cluster in the foreground and show its progress, for `halfmoon up`."""

import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import httpx
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from halfmoon_cli.common.cluster_key import read_cluster_key
from halfmoon_cli.common.local_key import STATE_FOLDERS, kept_key
from halfmoon_cli.up.embedded_cluster import ClusterPlan, EmbeddedCluster, ServiceProcess
from halfmoon_cli.up.metadata_probe import metadata_problem
from halfmoon_cli.up.pool_report import pool_lines
from halfmoon_cli.up.restart_policy import MAX_DEATHS, WINDOW_S, RestartPolicy
from halfmoon_metadata import open_store
from halfmoon_metadata.cluster_key_source import (
    CLUSTER_KEY_FILE_VARIABLE,
    CLUSTER_KEY_VARIABLE,
    ClusterKeyError,
    read_cluster_key_file,
)
from halfmoon_metadata.store_interface import MetadataError
from halfmoon_metadata.tls_trust import certificate_problem, trust_context
from halfmoon_runtime.lifecycle import SAME_SIGNAL_S
from halfmoon_runtime.membership import MEMBERS, readable_members
from halfmoon_runtime.observability.operator_tokens import operator_token

_POLL_S = 0.2
#: Seconds beyond its drain in which a process ends.
_STOP_S = 15.0
#: A question that the demo model can answer. It has no apostrophe, which a shell would need quoted.
#: It is longer than a block: a second request finds a part of it cached.
_EXAMPLE = (
    "Ada has the number 4821. Bruno has the number 1733. Clara has the number 9064. "
    "Dora has the number 2250. Emil has the number 7318. Fiona has the number 5946. "
    "Gustav has the number 8107. Hanna has the number 3695. What number does Clara have?"
)
_STYLES = {"ready": "green", "stopped": "red", "starting": "dim"}


class _Stop(Exception):
    """Ctrl-C, SIGTERM or a closed terminal: the cluster shall stop."""


@dataclass(frozen=True)
class _KeyChoice:
    """The cluster's key, and where it comes from."""

    #: Empty: the cluster has none.
    key: str
    #: The state folder's; None: it is the environment's, or there is none.
    file: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the services, in place of this process's own."""
        if self.key and not self.file:
            return {}
        path = str(self.file) if self.file else ""
        return {CLUSTER_KEY_VARIABLE: "", CLUSTER_KEY_FILE_VARIABLE: path}


def run_up(plan: ClusterPlan, folder: Path, console: Console, *, with_key: bool = True) -> int:
    """Start a cluster, watch it until it stops, and return the exit status.

    Args:
        plan: what to start.
        folder: state folder, for logs and for the cluster's key.
        console: shows progress.
        with_key: whether the cluster has a key; without one in the environment, the folder's.
    """
    with ExitStack() as stack:
        try:
            chosen = _choose_key(stack, folder, with_key)
        except (ClusterKeyError, OSError) as error:
            _refuse(str(error), console)
            return 2
        problem = plan.metadata and metadata_problem(
            plan.metadata, cluster_key=chosen.key, tls_ca=plan.tls_ca, cluster=plan.cluster
        )
        if problem:
            _refuse(problem, console)
            return 2
        plan = replace(plan, environment=chosen.environment)
        return _run(plan, folder, console, chosen)


def _choose_key(stack: ExitStack, folder: Path, with_key: bool) -> _KeyChoice:
    if not with_key:
        return _KeyChoice("")
    if key := read_cluster_key():
        return _KeyChoice(key)
    path = stack.enter_context(kept_key(folder))
    return _KeyChoice(read_cluster_key_file(str(path)), path)


def _run(plan: ClusterPlan, folder: Path, console: Console, chosen: _KeyChoice) -> int:

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise _Stop

    # Set explicitly, since a shell starts its background jobs with SIGINT ignored.
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, on_signal)  # the terminal was closed
    cluster = EmbeddedCluster(plan, folder)
    try:
        cluster.start()
        if not _wait_ready(cluster, console):
            return 1
        _greet(plan, console, chosen)
        _show_pools(cluster, console)
        console.print("Ctrl-C stops it.")
        return _watch(cluster, console)
    except _Stop:
        console.print(
            f"\nstopping: requests under way have {plan.drain_s:g} s to end, "
            "Ctrl-C again stops at once …"
        )
        return 0
    finally:
        _stop(cluster)


def _stop(cluster: EmbeddedCluster) -> None:
    """Stop the cluster; a further signal after a second kills what still runs."""
    began = time.monotonic()

    def on_signal(number: int, frame: FrameType | None) -> None:
        # A signal to the whole group comes twice, if its leader passes it on.
        if time.monotonic() > began + SAME_SIGNAL_S:
            for process in cluster.processes.values():
                process.signal(signal.SIGKILL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal may close meanwhile
    cluster.stop(cluster.plan.drain_s + _STOP_S)


def _wait_ready(cluster: EmbeddedCluster, console: Console) -> bool:
    """Show progress until all processes are ready; return False when one dies first."""
    began = time.monotonic()
    #: Whether the REST API is ready, or why its certificate is not accepted.
    answers: bool | str = False
    #: Misspelt variables that are shown.
    shown: set[str] = set()
    with Live(console=console, refresh_per_second=8) as live:
        while True:
            live.update(status_table(cluster.processes, time.monotonic() - began))
            _show_misspelt(cluster, shown, console)
            if dead := cluster.dead():
                break
            if cluster.processes["conductor-0"].stage == "ready":
                answers = _answers(cluster.plan)
            if isinstance(answers, str):
                break
            if cluster.ready() and answers:
                return True
            time.sleep(_POLL_S)
    if isinstance(answers, str):
        _refuse(answers, console)
        return False
    # All processes serve the same model: a refusal is printed once, in one line.
    if refusal := next(filter(None, (process.refusal for process in dead)), None):
        _refuse(refusal, console)
        return False
    for process in dead:
        _report_death(process, console)
    return False


def _show_misspelt(cluster: EmbeddedCluster, shown: set[str], console: Console) -> None:
    """Warn of variables that services take for misspelt settings, of each one once."""
    for process in cluster.processes.values():
        for variable, meant in process.misspelt.items():
            if variable not in shown:
                shown.add(variable)
                told = f"{variable} is no setting: did you mean {meant}?"
                console.print("[yellow]halfmoon:[/yellow]", escape(told), soft_wrap=True)


def _watch(cluster: EmbeddedCluster, console: Console) -> int:
    """Restart processes that end; return 1 when the conductor ends again and again."""
    policy = RestartPolicy()
    #: When processes that ended are started again; never: they stay stopped.
    starts_s: dict[str, float] = {}
    restarted: set[str] = set()
    while True:
        now = time.monotonic()
        for process in cluster.dead():
            name = process.spec.name
            if name not in starts_s:
                starts_s[name] = _after_death(process, policy, console)
                if starts_s[name] == math.inf and process.spec.role == "conductor":
                    console.print("[red]without a conductor nothing is served: stopping[/red]")
                    return 1
        for name in [name for name, start_s in starts_s.items() if start_s <= now]:
            del starts_s[name]
            cluster.restart(name)
            restarted.add(name)
        for name in [n for n in restarted if cluster.processes[n].stage == "ready"]:
            restarted.remove(name)
            console.print(f"[green]{name} is ready again[/green]")
        time.sleep(_POLL_S)


def _after_death(process: ServiceProcess, policy: RestartPolicy, console: Console) -> float:
    """Report a process that ended; return when it is started again, infinity: it is not."""
    _report_death(process, console)
    now, name = time.monotonic(), process.spec.name
    pause_s = policy.pause_after_death(name, now)
    if process.refusal is not None:
        console.print(f"[red]{name} stays stopped: another start would end as this one did[/red]")
        return math.inf
    if pause_s is None:
        often = f"{MAX_DEATHS} times within {WINDOW_S:g} s"
        console.print(f"[red]{name} stays stopped: it ended {often}; the others go on[/red]")
        return math.inf
    console.print(f"{name} is started again in {pause_s:g} s", highlight=False)
    return now + pause_s


def _refuse(reason: str, console: Console) -> None:
    console.print("\n[red]halfmoon:[/red]", escape(reason), highlight=False, soft_wrap=True)


def _answers(plan: ClusterPlan) -> bool | str:
    """Return whether the REST API is ready; a text says why its certificate is not accepted."""
    try:
        return _get(plan, "/ready", timeout_s=1.0).status_code == 200
    except httpx.HTTPError as error:
        problem = certificate_problem(error)
        return f"{plan.url}: {problem}" if problem else False


def _get(plan: ClusterPlan, path: str, timeout_s: float) -> httpx.Response:
    verify = trust_context(plan.tls_ca) if plan.is_tls else True
    return httpx.get(f"{plan.url}{path}", timeout=timeout_s, verify=verify)


def status_table(processes: Mapping[str, ServiceProcess], elapsed_s: float) -> Table:
    """Return a table of services, their states and their addresses."""
    table = Table(box=None, pad_edge=False, title=f"Halfmoon · {elapsed_s:.0f} s")
    table.title_justify = "left"
    for column in ("service", "state"):
        table.add_column(column, no_wrap=True)
    # Addresses are to be copied: a narrow terminal breaks them, and cuts none.
    table.add_column("", overflow="fold")
    for name, process in processes.items():
        stage = process.stage if process.exit_code is None else "stopped"
        hidden = {"stage", "pid", "worker_id", "service", "time", "operators", "misspelt"}
        hidden |= {"max_context", "token_bytes", "dtype"}
        details = ", ".join(f"{k}={v}" for k, v in process.status.items() if k not in hidden)
        table.add_row(name, Text(stage, _STYLES.get(stage, "yellow")), Text(details, "dim"))
    return table


def _report_death(process: ServiceProcess, console: Console) -> None:
    code = process.exit_code or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    console.print(f"\n[red]{process.spec.name} {how}[/red]; its last log lines:")
    for line in process.last_lines():
        console.print(Text("  " + line))
    console.print(Text(f"  (all of it: {process.log_path})", "dim"))


def _greet(plan: ClusterPlan, console: Console, chosen: _KeyChoice) -> None:
    """Print the URLs, a command line to paste, and where the cluster's key is."""
    answer = _get(plan, "/v1/models", timeout_s=10.0)
    needs_key = answer.status_code in (401, 403)
    body = {
        "model": _model_of_workers(plan, chosen.key)
        if needs_key
        else answer.json()["data"][0]["id"],
        "messages": [{"role": "user", "content": _EXAMPLE}],
        "max_tokens": 32,
    }
    line = (
        f"curl{f' --cacert {shlex.quote(plan.tls_ca)}' if plan.tls_ca else ''}"
        f" {plan.url}/v1/chat/completions -H 'Content-Type: application/json'"
        + (' -H "Authorization: Bearer $OPENAI_API_KEY"' if needs_key else "")
        + f" -d {shlex.quote(json.dumps(body))}"
    )
    if needs_key:
        console.print("Clients need a tenant's key: put one into OPENAI_API_KEY.")
    console.print(f"\n[green]ready[/green] at [bold]{plan.url}[/bold] · try\n")
    console.print(Text(line), soft_wrap=True)
    console.print("\nAgain, and cached_tokens says what was not computed again.")
    # With tenants, the page's playground needs an operator's API key, which opens the rest too.
    token = operator_token(chosen.key) if chosen.key and not needs_key else ""
    page = f"{plan.url}/#token={token}" if token else plan.url
    console.print(Text(f"In a browser {page} shows the cluster."), soft_wrap=True)
    program = os.path.relpath(Path(sys.executable).with_name("halfmoon"))
    line = f"To talk with it: {shlex.quote(program)} chat --url {plan.url}"
    console.print(Text(line), soft_wrap=True)
    if chosen.file is not None:
        line = f"export {CLUSTER_KEY_FILE_VARIABLE}={shlex.quote(str(chosen.file))}"
        if chosen.file.parent in [each.resolve() for each in STATE_FOLDERS]:
            line = f"Commands in this folder find the cluster's key; for others: {line}"
        else:
            line = f"For commands that need the cluster's key: {line}"
        console.print(Text(line), soft_wrap=True)
    elif not chosen.key:
        console.print(
            "The cluster has no key: each process of this machine can read and change it.",
            soft_wrap=True,
        )
    if plan.limits:
        told = ", ".join(f"{flag} {value}" for flag, value in plan.limits.items())
        console.print(
            f"Limits: {told}. Requests beyond them get 429 with Retry-After; --no-limits turns"
            " them off, -o conductor.FLAG=VALUE sets others.",
            soft_wrap=True,
            highlight=False,
        )


def _show_pools(cluster: EmbeddedCluster, console: Console) -> None:
    """Print how many tokens the workers' pools hold, and warn where that is too few."""
    processes = cluster.processes.values()
    lines, warnings = pool_lines((process.spec.role, process.status) for process in processes)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    for warning in warnings:
        console.print("[yellow]halfmoon:[/yellow]", escape(warning), soft_wrap=True)


def _model_of_workers(plan: ClusterPlan, cluster_key: str) -> str:
    """Return the model's name in the workers' records, where the REST API needs a key."""
    store = open_store(
        plan.metadata_url, cluster_key=cluster_key, tls_ca=plan.tls_ca, cluster=plan.cluster
    )
    try:
        infos = readable_members(store.list(MEMBERS)).values()
    except MetadataError:
        return plan.served_model_name
    finally:
        store.close()
    return next((info.model for info in infos if info.model), plan.served_model_name)
