"""Define `halfmoon up`: check its flags, choose model and port, and run the cluster."""

import math
import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from halfmoon_cli.common.demo_model import DEMO_MODEL_NAME, DemoModelMissing, demo_model_folder
from halfmoon_cli.common.local_key import WithClusterKey
from halfmoon_cli.up.default_limits import SUMMARY, default_limits
from halfmoon_cli.up.embedded_cluster import ClusterPlan, metadata_port_beside
from halfmoon_cli.up.http_port import PortInUse, choose_http_port
from halfmoon_cli.up.role_options import (
    FLEXIBLE_OPTIONS,
    HYBRID_OPTIONS,
    BadRoleOption,
    role_options,
)
from halfmoon_cli.up.worker_memory import worker_memory_mib
from halfmoon_cli.up.worker_threads import worker_threads
from halfmoon_metadata.cluster_namespace import (
    CLUSTER_VARIABLE,
    DEFAULT_CLUSTER,
    InvalidClusterName,
    cluster_prefix,
)
from halfmoon_metadata.tls_trust import TLS_CA_VARIABLE, trust_context
from halfmoon_models.errors import ModelError
from halfmoon_models.machine_cores import machine_cores
from halfmoon_models.machine_memory import read_memory
from halfmoon_models.model_kinds import unserved_inputs
from halfmoon_runtime.setting_names import ENVIRONMENT_PREFIX

#: Port of the REST API where it is free.
DEFAULT_PORT = 8000
_THREADS_VARIABLE = f"{ENVIRONMENT_PREFIX}THREADS"
_SHARE_VARIABLE = f"{ENVIRONMENT_PREFIX}DEVICE_SHARE"

console = Console()


def up(
    model: Annotated[
        str,
        typer.Option(
            envvar="MODEL",
            help="Folder or hub id of the model; fake://… for the engine without one. "
            "Without it: the small demo model that comes with Halfmoon.",
        ),
    ] = "",
    engine: Annotated[
        str,
        typer.Option(
            envvar="ENGINE",
            help="What computes the model: torch, or vllm where it is installed; "
            "-o decode.engine=torch for one role",
        ),
    ] = "torch",
    prefill: Annotated[int, typer.Option(envvar="PREFILL", min=1, help="Prefill workers")] = 1,
    group: Annotated[
        int,
        typer.Option(
            envvar="GROUP",
            min=0,
            help="Prefill workers that compute a long prompt together, each a part of the layers; "
            "0: none. --prefill is a multiple of it",
        ),
    ] = 0,
    decode: Annotated[int, typer.Option(envvar="DECODE", min=1, help="Decode workers")] = 1,
    kvstore: Annotated[int, typer.Option(envvar="KVSTORE", min=0, help="KV stores")] = 1,
    flexible: Annotated[
        bool,
        typer.Option(
            help="Let workers change between prefill and decode by load: all of them list both"
            " roles, and the conductor decides"
        ),
    ] = False,
    hybrid: Annotated[
        bool,
        typer.Option(
            help="As --flexible, and decode workers prefill prompts of any length where that is"
            " predicted to bring the first token sooner"
        ),
    ] = False,
    port: Annotated[
        int,
        typer.Option(
            envvar="PORT", min=0, max=65535, help="Port of the REST API; 0: 8000, or a free one"
        ),
    ] = 0,
    name: Annotated[
        str, typer.Option(envvar="SERVED_MODEL_NAME", help="Name of the model as clients write it")
    ] = "",
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
    ] = Path(".halfmoon/up"),
    tls_cert: Annotated[
        str,
        typer.Option(
            envvar="HALFMOON_TLS_CERT",
            help="PEM file of the certificate that all services serve HTTP with; it must name the"
            " host that the REST API listens on",
        ),
    ] = "",
    tls_key: Annotated[
        str, typer.Option(envvar="HALFMOON_TLS_KEY", help="PEM file with the key of --tls-cert")
    ] = "",
    tls_ca: Annotated[
        str,
        typer.Option(
            envvar=TLS_CA_VARIABLE,
            help="PEM file of CAs that all processes trust besides the system's",
        ),
    ] = "",
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
            help="A flag for the services of a role, as ROLE.FLAG=VALUE: "
            "-o prefill.chunk-tokens=256 -o conductor.placement=min_ttft",
        ),
    ] = None,
) -> None:
    """Start a cluster on this machine and keep it in the foreground until Ctrl-C."""
    from halfmoon_cli.up.foreground import run_up
    from halfmoon_engine.checkpoints.model_folder import check_model

    try:
        cluster_prefix(cluster)
        chosen = choose_http_port(port, DEFAULT_PORT, by_make=True)
    except (InvalidClusterName, PortInUse) as error:
        _give_up(str(error))
    if bool(tls_cert) != bool(tls_key):
        _give_up("TLS needs both, --tls-cert and --tls-key: one of them is missing")
    try:
        trust_context(tls_ca)
    except ValueError as error:
        _give_up(str(error))
    if group == 1 or (group and prefill % group):
        _give_up(
            f"--group is {group} and --prefill {prefill}: a group has two workers or more, and "
            "--prefill is a multiple of it"
        )
    if flexible and group:
        _give_up(
            f"--flexible with --group {group}: the engine of a group's member computes one stage of"
            " a prompt and can't be a decode worker's; leave one of them out"
        )
    if flexible and prefill + decode == 2:
        console.print(
            "--flexible changes nothing with one prefill and one decode worker: each is the last"
            " one of its role. --prefill 2 or --decode 2 gives one that can change.",
            highlight=False,
            soft_wrap=True,
        )
    if not model:
        try:
            model, name = str(demo_model_folder()), name or DEMO_MODEL_NAME
        except DemoModelMissing as error:
            _give_up(str(error))
    try:
        options = HYBRID_OPTIONS if hybrid else FLEXIBLE_OPTIONS if flexible else ()
        extra = role_options([*options, *(option or [])])
        flags = [flag for of_role in extra.values() for flag in of_role]
        torch_only = engine == "torch" and not any(f.startswith("--engine=") for f in flags)
        # Other engines can tell themselves which quantised models they serve.
        config = check_model(model, quantised=not torch_only)
    except (ModelError, BadRoleOption) as error:
        _give_up(str(error))
    if unserved := unserved_inputs(config):
        console.print(escape(unserved), highlight=False, soft_wrap=True)
    plan = ClusterPlan(
        model=model,
        engine=engine,
        http_port=chosen,
        n_prefill=prefill,
        group_size=group,
        n_decode=decode,
        n_kvstore=kvstore,
        served_model_name=name,
        metadata=metadata,
        cluster=cluster,
        metadata_port=metadata_port_beside(chosen),
        # What the environment sets, the processes read themselves.
        threads={}
        if _THREADS_VARIABLE in os.environ
        else worker_threads(machine_cores(), prefill, decode, engine),
        memory_mib=worker_memory_mib(
            read_memory(),
            {"prefill": prefill, "decode": decode, "kvstore": kvstore},
            extra,
            os.environ,
        ),
        device_share=0.0
        if _SHARE_VARIABLE in os.environ
        else math.floor(1000 / (prefill + decode)) / 1000,
        extra=extra,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_ca=tls_ca,
        limits=default_limits(extra.get("conductor", ()), os.environ) if limits else {},
    )
    try:
        plan.url  # noqa: B018
    except ValueError as error:
        _give_up(f"--option conductor.host: {error}")
    raise typer.Exit(run_up(plan, state, console, with_key=cluster_key))


def _give_up(message: str) -> NoReturn:
    console.print("[red]halfmoon:[/red]", escape(message), highlight=False, soft_wrap=True)
    raise typer.Exit(2)
