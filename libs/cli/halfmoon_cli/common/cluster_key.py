"""Read the cluster's key, which commands take from the environment, or from the file it names."""

import typer

from halfmoon_metadata.cluster_key_source import cluster_key_from_environment
from halfmoon_protocol.cluster_keys import split_cluster_keys


def read_cluster_key() -> str:
    """Return the cluster's key or keys; empty if there is none. An option would show it to `ps`.

    What is wrong with it ends the command with status 2.
    """
    try:
        key = cluster_key_from_environment()
        split_cluster_keys(key)
        return key
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
