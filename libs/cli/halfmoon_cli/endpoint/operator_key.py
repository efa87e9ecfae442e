"""Choose what a command shows on the routes for operators, and print it for browsers."""

import typer

from halfmoon_cli.common.cluster_key import read_cluster_key
from halfmoon_cli.common.local_key import use_local_key
from halfmoon_cli.endpoint.endpoint_address import DEFAULT_URL
from halfmoon_metadata.cluster_key_source import CLUSTER_KEY_FILE_VARIABLE, CLUSTER_KEY_VARIABLE
from halfmoon_runtime.observability.operator_tokens import operator_token


def operator_key(url: str, api_key: str) -> str:
    """Return what a conductor's routes for operators want.

    A cluster key in the environment gives the operators' token, and goes before the API key. With
    neither, the key of a cluster that was started in this folder gives it.
    """
    if not api_key:
        use_local_key(url)
    cluster_key = read_cluster_key()
    return operator_token(cluster_key) if cluster_key else api_key


def print_operator_token() -> None:
    """Print the token that the web page and /debug want where there is a cluster key."""
    use_local_key(DEFAULT_URL)
    cluster_key = read_cluster_key()
    if not cluster_key:
        typer.echo(
            f"{CLUSTER_KEY_VARIABLE} is not set, nor {CLUSTER_KEY_FILE_VARIABLE}, and no cluster "
            "runs here with a key of its own: a cluster without a key wants no token. With "
            "tenants, use an operator's API key.",
            err=True,
        )
        raise typer.Exit(2)
    typer.echo(operator_token(cluster_key))
