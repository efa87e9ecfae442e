"""Put the `halfmoon` command together out of its subcommands."""

import typer

from halfmoon_cli.bench.bench_command import bench_command
from halfmoon_cli.chat.chat_command import chat
from halfmoon_cli.endpoint.operator_key import print_operator_token
from halfmoon_cli.kv.kv_commands import app as kv_app
from halfmoon_cli.roles.role_commands import app as roles_app
from halfmoon_cli.route.route_command import route
from halfmoon_cli.simulate.paper_command import paper
from halfmoon_cli.simulate.profile_command import profile
from halfmoon_cli.simulate.sim_cluster_command import sim_cluster
from halfmoon_cli.simulate.simulate_command import simulate
from halfmoon_cli.status.status_command import status
from halfmoon_cli.transfer.p2p_commands import app as p2p_app
from halfmoon_cli.transfer.transfer_commands import app as transfer_app
from halfmoon_cli.up.up_command import up

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Halfmoon: disaggregated serving around a pooled KV cache.",
)
app.add_typer(transfer_app, name="transfer")
app.add_typer(p2p_app, name="p2p")
app.add_typer(kv_app, name="kv")
app.add_typer(roles_app, name="roles")
app.command()(up)
app.command()(route)
app.command()(status)
app.command("operator-token")(print_operator_token)
app.command()(chat)
app.command("bench")(bench_command)
app.command()(simulate)
app.command()(paper)
app.command()(profile)
app.command("sim-cluster")(sim_cluster)


@app.callback()
def halfmoon() -> None:
    """Halfmoon: disaggregated serving around a pooled KV cache."""


def main() -> None:
    """Run the `halfmoon` command."""
    app()


if __name__ == "__main__":
    main()
