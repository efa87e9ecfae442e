"""Choose what a command shows on the routes for operators, and print it for browsers."""

import typer

from halfmoon_cli.common.cluster_key import read_cluster_key
from halfmoon_metadata.cluster_key_source import CLUSTER_KEY_FILE_VARIABLE, CLUSTER_KEY_VARIABLE


def operator_key(api_key: str) -> str:
    """Return the operators' token if the environment has the cluster's key, else the API key."""
    from halfmoon_runtime.observability.operator_http import operator_token

    cluster_key = read_cluster_key()
    return operator_token(cluster_key) if cluster_key else api_key


def print_operator_token() -> None:
    """Print the token that the web page and /debug want where there is a cluster key."""
    from halfmoon_runtime.observability.operator_http import operator_token

    cluster_key = read_cluster_key()
    if not cluster_key:
        typer.echo(
            f"{CLUSTER_KEY_VARIABLE} is not set, nor {CLUSTER_KEY_FILE_VARIABLE}: a cluster "
            "without a key wants no token. With tenants, use an operator's API key.",
            err=True,
        )
        raise typer.Exit(2)
    typer.echo(operator_token(cluster_key))
