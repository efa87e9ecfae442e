"""Serve a region that `halfmoon transfer bench` on another host finds by its name.

The region's key is written into the metadata store: all readers of the store can write into the
region, which holds nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from halfmoon_metadata import MetadataStore
from halfmoon_protocol.regions import Region
from halfmoon_transfer import (
    ClusterKey,
    TransferEngine,
    TransferSettings,
    encryption_from_environment,
)

TARGET_PREFIX = "halfmoon/bench/"
DEFAULT_TARGET_NAME = "bench-target"


@contextmanager
def serve_target(
    store: MetadataStore,
    name: str,
    *,
    backend: str,
    n_bytes: int,
    bind: str,
    advertise: str,
) -> Iterator[TransferEngine]:
    """Offer a region of so many bytes under this name while the block runs.

    Raises:
        ValueError: a bad name, backend or address.
        TransferError: another target of this name has started since.
        MetadataError: the store can't.
        OSError: nothing can listen there, or there is no such memory.
    """
    with TransferEngine.open(
        name,
        metadata=store,
        backends=(backend,),
        bind=bind,
        advertise=advertise or None,
        settings=TransferSettings(
            cluster_key=ClusterKey.from_environment(), encryption=encryption_from_environment()
        ),
    ) as engine:
        record = msgspec.json.encode(engine.allocate(n_bytes).region)
        store.put(TARGET_PREFIX + name, record)
        try:
            yield engine
        finally:
            # Unless another one has taken the name.
            store.compare_and_swap(TARGET_PREFIX + name, record, None)


def find_target_region(store: MetadataStore, name: str) -> Region:
    """Return the region of a target.

    Raises:
        ValueError: there is no such target, or no record of one.
        MetadataError: the store can't.
    """
    record = store.get(TARGET_PREFIX + name)
    if record is None:
        known = (
            ", ".join(key.removeprefix(TARGET_PREFIX) for key in store.list(TARGET_PREFIX))
            or "none"
        )
        raise ValueError(
            f"there is no target {name!r}; known: {known}. Start one with "
            "`halfmoon transfer target`"
        )
    try:
        return msgspec.json.decode(record, type=Region)
    except msgspec.DecodeError as error:
        raise ValueError(f"{TARGET_PREFIX}{name} is not a target's record: {error}") from None
