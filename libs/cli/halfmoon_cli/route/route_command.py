"""Define `halfmoon route`: check its flags and the servers, and run a conductor before them."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from halfmoon_cli.common.local_key import WithClusterKey
from halfmoon_cli.up.default_limits import SUMMARY, default_limits
from halfmoon_cli.up.embedded_cluster import ClusterPlan, metadata_port_beside
from halfmoon_cli.up.http_port import PortInUse, choose_http_port
from halfmoon_cli.up.role_options import BadRoleOption, role_options
from halfmoon_metadata.cluster_namespace import (
    CLUSTER_VARIABLE,
    DEFAULT_CLUSTER,
    InvalidClusterName,
    cluster_prefix,
)
from halfmoon_metadata.tls_trust import tls_ca_from_environment
from halfmoon_runtime.setting_names import ENVIRONMENT_PREFIX

if TYPE_CHECKING:
    from halfmoon_servers.bridge.server_target import ServerRole, ServerTarget

#: Port of the REST API where it is free.
DEFAULT_PORT = 8000
#: Roles of the processes that `halfmoon route` starts.
ROLES = ("conductor", "servers")
_KEY_VARIABLE = f"{ENVIRONMENT_PREFIX}SERVER_API_KEY"

console = Console()


def route(
    worker: Annotated[
        list[str] | None,
        typer.Option(
            "--worker",
            help="URL of a server, such as http://127.0.0.1:8001; several times for several. Its"
            " KV events are found by themselves, or are named behind it:"
            " URL,events=tcp://HOST:PORT,replay=tcp://HOST:PORT",
        ),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option("--prefill", help="URL of the prefill server of a pair, likewise"),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option("--decode", help="URL of the decode server of a pair, likewise"),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            envvar="MODEL",
            help="Folder or hub id of the model's tokenizer; without it: as the servers say",
        ),
    ] = "",
    name: Annotated[
        str,
        typer.Option(
            "--served-model-name",
            "--name",
            envvar="SERVED_MODEL_NAME",
            help="Name of the model as clients write it; without it: the servers' own",
        ),
    ] = "",
    port: Annotated[
        int,
        typer.Option(
            envvar="PORT", min=0, max=65535, help="Port of the REST API; 0: 8000, or a free one"
        ),
    ] = 0,
    metadata: Annotated[
        str, typer.Option(envvar="METADATA", help="Metadata server; without it: the conductor's")
    ] = "",
    cluster: Annotated[
        str,
        typer.Option(
            envvar=CLUSTER_VARIABLE,
            help="Name of the cluster: several share one metadata server under names of their own",
        ),
    ] = DEFAULT_CLUSTER,
    state: Annotated[
        Path,
        typer.Option(
            envvar="HALFMOON_STATE", help="Folder for logs, progress files and the cluster's key"
        ),
    ] = Path(".halfmoon/route"),
    ttft_slo_s: Annotated[
        float | None,
        typer.Option(
            "--ttft-slo-s",
            help="Largest acceptable time to first token, seconds: a request that is predicted to"
            " miss it gets 429",
        ),
    ] = None,
    tbt_slo_s: Annotated[
        float | None,
        typer.Option("--tbt-slo-s", help="Largest acceptable time between tokens, likewise"),
    ] = None,
    limits: Annotated[
        bool,
        typer.Option(
            help=f"Limit what waits: {SUMMARY}. Other limits: -o conductor.max-queue-s=300"
        ),
    ] = True,
    cluster_key: WithClusterKey = True,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            help="A flag for a process, as ROLE.FLAG=VALUE: -o conductor.placement=min_ttft"
            " -o servers.stall-s=30",
        ),
    ] = None,
) -> None:
    """Route among plain OpenAI-compatible servers by cached prefix and load, until Ctrl-C.

    The servers, such as `vllm serve`, need no change. HALFMOON_SERVER_API_KEY holds their key, if
    they want one.
    """
    from halfmoon_cli.route.server_survey import UnfitServers, common_block_size, survey_servers
    from halfmoon_cli.route.server_tokenizer import NoTokenizer, find_tokenizer
    from halfmoon_cli.up.foreground import run_up
    from halfmoon_servers.bridge.server_target import BadTarget

    try:
        chosen = choose_http_port(port, DEFAULT_PORT)
    except PortInUse as error:
        _give_up(str(error))
    try:
        cluster_prefix(cluster)
        targets = _targets(worker or [], prefill or [], decode or [])
        extra = role_options(option or [], ROLES)
        with console.status(f"asking {len(targets)} servers what they serve …"):
            described = survey_servers(targets, os.environ.get(_KEY_VARIABLE, ""))
        model = model or find_tokenizer(described[0])
    except (InvalidClusterName, BadTarget, BadRoleOption, UnfitServers, NoTokenizer) as error:
        _give_up(str(error))
    slos = {"ttft-slo-s": ttft_slo_s, "tbt-slo-s": tbt_slo_s}
    for flag, seconds in slos.items():
        if seconds is not None and seconds <= 0:
            _give_up(f"--{flag} is {seconds:g}: it is a time in seconds, more than 0")
    asked = {flag: f"{seconds:g}" for flag, seconds in slos.items() if seconds is not None}
    plan = ClusterPlan(
        model=model,
        http_port=chosen,
        served_model_name=name,
        metadata=metadata,
        cluster=cluster,
        metadata_port=metadata_port_beside(chosen),
        extra=extra,
        limits={
            **(default_limits(extra.get("conductor", ()), os.environ) if limits else {}),
            **asked,
        },
        bridge=(
            "--targets",
            msgspec.json.encode(targets).decode(),
            "--block-size",
            str(common_block_size(described)),
        ),
        # The processes read these themselves; the URL's scheme follows from them.
        tls_cert=os.environ.get("HALFMOON_TLS_CERT", ""),
        tls_key=os.environ.get("HALFMOON_TLS_KEY", ""),
        tls_ca=tls_ca_from_environment(),
    )
    for server in described:
        events = "KV events" if server.event_endpoints else "no KV events"
        version = f"{server.kind} {server.version}".strip()
        console.print(
            f"{server.url}: {server.model}, {version}, {events}", highlight=False, soft_wrap=True
        )
    raise typer.Exit(run_up(plan, state, console, with_key=cluster_key))


def _targets(worker: list[str], prefill: list[str], decode: list[str]) -> list["ServerTarget"]:
    """Parse the servers of all roles.

    Raises:
        BadTarget: one is of another form, or they can't work together.
    """
    from halfmoon_servers.bridge.server_target import BadTarget, check_targets, parse_target

    if not (worker or prefill or decode):
        raise BadTarget("no server is named: add --worker http://HOST:PORT for each")
    by_role: tuple[tuple[ServerRole, list[str]], ...] = (
        ("both", worker),
        ("prefill", prefill),
        ("decode", decode),
    )
    targets = [parse_target(text, role) for role, texts in by_role for text in texts]
    check_targets(targets)
    return targets


def _give_up(message: str) -> NoReturn:
    console.print("[red]halfmoon:[/red]", escape(message), highlight=False, soft_wrap=True)
    raise typer.Exit(2)
