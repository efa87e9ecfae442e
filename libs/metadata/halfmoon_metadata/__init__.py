"""Store small shared records under leases: in memory, over HTTP, in Redis or in etcd."""

from halfmoon_metadata.store_interface import (
    MetadataError,
    MetadataRefused,
    MetadataStore,
    MetadataUnreachable,
)
from halfmoon_metadata.store_registry import open_store
from halfmoon_metadata.stores.memory_store import MemoryStore

__all__ = [
    "MemoryStore",
    "MetadataError",
    "MetadataRefused",
    "MetadataStore",
    "MetadataUnreachable",
    "open_store",
]
