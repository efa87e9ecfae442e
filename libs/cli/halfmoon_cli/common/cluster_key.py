"""Read the cluster's key, which commands take from the environment, or from the file it names."""

import typer

from halfmoon_metadata.cluster_key_source import ClusterKeyError, cluster_key_from_environment


def read_cluster_key() -> str:
    """Return the cluster's key; empty if there is none. An option would show it to `ps`."""
    try:
        return cluster_key_from_environment()
    except ClusterKeyError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
