"""Put the `halfmoon` command together out of its subcommands."""

import os
from importlib.metadata import version
from typing import Annotated

import typer

from halfmoon_cli.lazy_commands import LazyCommand, lazy_app

#: In the order of `halfmoon --help`: what most people look for comes first.
COMMANDS = {
    "up": LazyCommand(
        "halfmoon_cli.up.up_command:up",
        "Start a cluster on this machine and keep it in the foreground until Ctrl-C.",
    ),
    "chat": LazyCommand(
        "halfmoon_cli.chat.chat_command:chat",
        "Talk to a model: Halfmoon's, or any endpoint that speaks OpenAI's API.",
    ),
    "status": LazyCommand(
        "halfmoon_cli.status.status_command:status",
        "Show a cluster as its conductor sees it: workers, queues, memory, latencies, decisions.",
    ),
    "bench": LazyCommand(
        "halfmoon_cli.bench.bench_command:bench_command",
        "Load an OpenAI endpoint by the clock, by a trace or a made-up load; report its goodput.",
    ),
    "route": LazyCommand(
        "halfmoon_cli.route.route_command:route",
        "Route among plain OpenAI-compatible servers by cached prefix and load, until Ctrl-C.",
    ),
    "kv": LazyCommand(
        "halfmoon_cli.kv.kv_commands:app",
        "Look into the KV pool, put bytes in, get them out.",
    ),
    "roles": LazyCommand(
        "halfmoon_cli.roles.role_commands:app",
        "Show which worker prefills and which decodes, and change it.",
    ),
    "operator-token": LazyCommand(
        "halfmoon_cli.endpoint.operator_key:print_operator_token",
        "Print the token that the web page and /debug want where there is a cluster key.",
    ),
    "transfer": LazyCommand(
        "halfmoon_cli.transfer.transfer_commands:app",
        "Look at the ways that bytes can take.",
    ),
    "p2p": LazyCommand(
        "halfmoon_cli.transfer.p2p_commands:app",
        "Move folders between hosts, each a source.",
    ),
    "simulate": LazyCommand(
        "halfmoon_cli.simulate.simulate_command:simulate",
        "Run the scheduling core on a workload, with modelled engines and wires.",
    ),
    "paper": LazyCommand(
        "halfmoon_cli.simulate.paper_command:paper",
        "Print ours beside the published values, the setup, and what differs.",
    ),
    "profile": LazyCommand(
        "halfmoon_cli.simulate.profile_command:profile",
        "Measure prefill, decode and transfers on this machine; write a cost file.",
    ),
    "sim-cluster": LazyCommand(
        "halfmoon_cli.simulate.sim_cluster_command:sim_cluster",
        "Search for faults that break a promise: real services, a virtual clock, seeded faults.",
    ),
    "conform": LazyCommand(
        "halfmoon_cli.conform.conform_command:conform",
        "Test a service against docs/protocol.md as a black box.",
    ),
}

#: Their services know all settings, and name misspelt ones.
_STARTING_SERVICES = ("up", "route")

app = lazy_app(
    COMMANDS,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"halfmoon {version('halfmoon-cli')}")
        raise typer.Exit


@app.callback()
def halfmoon(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version"),
    ] = False,
) -> None:
    """Halfmoon: disaggregated serving around a pooled KV cache."""
    if context.invoked_subcommand in _STARTING_SERVICES:
        return
    from halfmoon_cli.common.command_variables import misspelt_command_variables

    for warning in misspelt_command_variables(os.environ):
        typer.echo(f"halfmoon: {warning}", err=True)


def main() -> None:
    """Run the `halfmoon` command."""
    app()


if __name__ == "__main__":
    main()
