"""Keep the records of several clusters apart in one metadata server.

The cluster `default` has the keys as they stand in docs/protocol.md. Another one has each of them
behind a prefix, so neither meets a record of the other.
"""

import os
import re

from halfmoon_metadata.store_interface import MetadataStore

#: Name of the cluster whose keys have no prefix.
DEFAULT_CLUSTER = "default"
#: Variable that names the cluster for services and commands.
CLUSTER_VARIABLE = "HALFMOON_CLUSTER"
MAX_CLUSTER_CHARS = 64
CLUSTER_PATTERN = rf"^[A-Za-z0-9._-]{{1,{MAX_CLUSTER_CHARS}}}$"
_NAME = re.compile(CLUSTER_PATTERN)


class InvalidClusterName(ValueError):
    """A cluster's name that has other characters, or too many; the text has the limit."""


def cluster_prefix(name: str) -> str:
    """Return what stands before all keys of a cluster; "" for the default one.

    Raises:
        InvalidClusterName: the name can't be one.
    """
    if _NAME.fullmatch(name) is None:
        raise InvalidClusterName(
            f"--cluster ({CLUSTER_VARIABLE}) is {name[: 2 * MAX_CLUSTER_CHARS]!r}: a name has 1 to "
            f"{MAX_CLUSTER_CHARS} letters, digits, dots, underscores or hyphens"
        )
    return "" if name == DEFAULT_CLUSTER else f"clusters/{name}/"


def cluster_from_environment() -> str:
    """Return the name in the environment, or the default one."""
    return os.environ.get(CLUSTER_VARIABLE) or DEFAULT_CLUSTER


class ClusterNamespace:
    """A `MetadataStore` of one cluster's records; the store below holds those of several.

    Its longest key is shorter than the store's, by the prefix.

    Args:
        store: holds the records; it is closed with this one.
        name: of the cluster, not the default one.

    Raises:
        InvalidClusterName: the name can't be one.
    """

    def __init__(self, store: MetadataStore, name: str) -> None:
        self._store = store
        self._prefix = cluster_prefix(name)

    def get(self, key: str) -> bytes | None:
        """See `MetadataStore.get`."""
        return self._store.get(self._prefix + key)

    def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> None:
        """See `MetadataStore.put`."""
        self._store.put(self._prefix + key, value, ttl_s=ttl_s)

    def delete(self, key: str) -> bool:
        """See `MetadataStore.delete`."""
        return self._store.delete(self._prefix + key)

    def list(self, prefix: str) -> dict[str, bytes]:
        """See `MetadataStore.list`."""
        there = self._store.list(self._prefix + prefix)
        return {key.removeprefix(self._prefix): value for key, value in there.items()}

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes | None, *, ttl_s: float | None = None
    ) -> bool:
        """See `MetadataStore.compare_and_swap`."""
        return self._store.compare_and_swap(self._prefix + key, expected, value, ttl_s=ttl_s)

    def increment(self, key: str) -> int:
        """See `MetadataStore.increment`."""
        return self._store.increment(self._prefix + key)

    def close(self) -> None:
        """See `MetadataStore.close`."""
        self._store.close()


def in_cluster(store: MetadataStore, name: str) -> MetadataStore:
    """Return a store of one cluster's records alone.

    Raises:
        InvalidClusterName: the name can't be one.
    """
    return ClusterNamespace(store, name) if cluster_prefix(name) else store
