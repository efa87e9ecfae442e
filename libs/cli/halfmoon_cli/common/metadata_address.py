"""Declare `--metadata` of the commands that need the metadata server, and open that server.

The metadata library is imported when a command runs.
"""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from halfmoon_cli.common.cluster_key import read_cluster_key
from halfmoon_cli.common.local_key import use_local_key

if TYPE_CHECKING:
    from halfmoon_metadata import MetadataStore

#: Where `halfmoon up` and a conductor with the default ports serve the metadata.
DEFAULT_METADATA = "http://127.0.0.1:7999/metadata"
METADATA_VARIABLE = "HALFMOON_METADATA"
METADATA_HELP = "The metadata server: http://…, redis://… or etcd://…"

Metadata = Annotated[str, typer.Option(envvar=METADATA_VARIABLE, help=METADATA_HELP)]


def metadata_or_default(url: str) -> str:
    """Return the URL, or that of the environment, or the default one."""
    return url or os.environ.get(METADATA_VARIABLE) or DEFAULT_METADATA


@contextmanager
def open_metadata(url: str) -> Iterator["MetadataStore"]:
    """Open the metadata server with the cluster's key and name; close it at the block's end.

    Raises:
        MetadataUnreachable: no metadata server answers there; the text has the way out.
        MetadataError: the server refused something.
    """
    from halfmoon_metadata import MetadataUnreachable, open_store
    from halfmoon_metadata.cluster_namespace import cluster_from_environment
    from halfmoon_metadata.tls_trust import tls_ca_from_environment

    use_local_key(url)
    try:
        with contextlib.closing(
            open_store(
                url,
                cluster_key=read_cluster_key(),
                tls_ca=tls_ca_from_environment(),
                cluster=cluster_from_environment(),
            )
        ) as store:
            yield store
    except MetadataUnreachable as error:
        raise MetadataUnreachable(
            f"{error}; `halfmoon up` serves one at {DEFAULT_METADATA},"
            f" --metadata or {METADATA_VARIABLE} names another"
        ) from error
