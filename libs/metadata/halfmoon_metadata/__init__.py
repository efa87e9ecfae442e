"""Store small shared records under leases: in memory, over HTTP, in Redis or in etcd.

The names below are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

#: Module of each public name, below this package.
_MODULES = {
    "MemoryStore": "stores.memory_store",
    "MetadataError": "store_interface",
    "MetadataRefused": "store_interface",
    "MetadataStore": "store_interface",
    "MetadataUnreachable": "store_interface",
    "open_store": "store_registry",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
