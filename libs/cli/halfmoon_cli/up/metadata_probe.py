"""Ask the metadata server of a plan once before its services start.

Services wait for a metadata server that is away, since they may have started before it. A user at a
terminal would see them join for ever, without a reason.
"""

import asyncio
import contextlib

from halfmoon_metadata import MetadataError, open_store
from halfmoon_runtime.cluster_claim import AnotherCluster, ClusterClaim
from halfmoon_runtime.membership import MEMBERS

_WAY_OUT = "--metadata names another, and without it the conductor serves one itself"


def metadata_problem(url: str, *, cluster_key: str, tls_ca: str, cluster: str) -> str | None:
    """Return why processes of a cluster can't meet in a metadata server, with the way out.

    A server with the records of another cluster is refused; else they are claimed for this one.

    Args:
        url: of the metadata server; its password is not in the result.
        cluster_key: see `open_store`.
        tls_ca: see `open_store`.
        cluster: see `open_store`.

    Returns:
        One line; None if the server answers and is this cluster's.
    """
    if url.startswith("memory:"):
        return f"metadata URL {url!r}: each process would have a store of its own; {_WAY_OUT}"
    try:
        with contextlib.closing(
            open_store(url, cluster_key=cluster_key, tls_ca=tls_ca, cluster=cluster)
        ) as store:
            store.get(MEMBERS)
            asyncio.run(ClusterClaim(store, cluster_key, url).take())
    except AnotherCluster as error:
        return str(error)
    except (MetadataError, ValueError) as error:
        return f"{' '.join(str(error).split())}; {_WAY_OUT}"
    return None
