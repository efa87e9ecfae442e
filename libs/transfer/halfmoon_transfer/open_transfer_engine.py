"""Open a transfer engine from plain values, as the settings of a service hold them."""

from collections.abc import Sequence

from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_transfer.cluster_key import ClusterKey
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.settings import TransferSettings


def open_transfer_engine(
    name: str,
    *,
    metadata: MetadataStore,
    generation: int,
    backends: Sequence[str],
    bind: Sequence[str],
    advertise: Sequence[str],
    host_id: str,
    cluster_key: str,
    encryption: bool,
) -> TransferEngine:
    """Open a service's segment and publish how peers reach it.

    Args:
        name: as for `TransferEngine.open`, like the arguments up to `host_id`.
        metadata: store of the descriptors.
        generation: start of this segment.
        backends: names of paths, best first.
        bind: addresses to listen on.
        advertise: addresses for peers to dial.
        host_id: machine id.
        cluster_key: secret that peers must know; empty: none.
        encryption: whether TCP encrypts if there is a cluster key.

    Raises:
        ValueError: a bad name, backend, address or key.
        Rejected: a later generation of this segment is published already.
        OSError: no listener could be opened, or this machine lacks what a backend needs.
        MetadataError: the store can't be reached.
    """
    return TransferEngine.open(
        name,
        metadata=metadata,
        generation=generation,
        backends=backends,
        bind=bind,
        advertise=advertise,
        host_id=host_id,
        settings=TransferSettings(cluster_key=ClusterKey.given(cluster_key), encryption=encryption),
    )
