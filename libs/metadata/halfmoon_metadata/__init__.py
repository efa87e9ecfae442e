"""Small shared records under leases: in memory, over HTTP, in Redis, in etcd."""

from halfmoon_metadata.memory import MemoryStore
from halfmoon_metadata.opening import open_store
from halfmoon_metadata.store import (
    MetadataError,
    MetadataRefused,
    MetadataStore,
    MetadataUnreachable,
)

__all__ = [
    "MemoryStore",
    "MetadataError",
    "MetadataRefused",
    "MetadataStore",
    "MetadataUnreachable",
    "open_store",
]
