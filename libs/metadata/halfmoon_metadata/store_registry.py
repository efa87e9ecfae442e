"""Choose a store by URL scheme; its module and client library are imported only then."""

import threading
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

from halfmoon_metadata.cluster_namespace import DEFAULT_CLUSTER, cluster_prefix, in_cluster
from halfmoon_metadata.metadata_token import metadata_token
from halfmoon_metadata.password_file import with_password_of_file
from halfmoon_metadata.redacted_url import redact_url
from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_metadata.stores.memory_values import MemoryValues
from halfmoon_metadata.value_store import ValueStore

_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


class _Access(NamedTuple):
    """Name what a store needs besides its URL."""

    cluster_key: str
    tls_ca: str


def open_store(
    url: str, *, cluster_key: str = "", tls_ca: str = "", cluster: str = DEFAULT_CLUSTER
) -> MetadataStore:
    """Open the store that `url` names; it connects at its first call.

    Args:
        url: ``memory://name`` (one per name and process), ``http://host:port/metadata``,
            ``https://…``, ``redis://host:port/0``, ``rediss://…``, ``etcd://host:2379`` or
            ``etcds://…``. Those with an s speak TLS. Redis and etcd may name a file of their
            password, see `password_file`.
        cluster_key: the cluster's key, if it has one. Stores over HTTP show a token derived from
            it; Redis and etcd have the user and password of their URL.
        tls_ca: PEM file of CAs to trust besides the system's, see `tls_trust`.
        cluster: name of the cluster whose records these are, see `cluster_namespace`.

    Raises:
        ValueError: a scheme that is not one of these, no host, a bad file of CAs or of a
            password, or a name that no cluster can have.
    """
    cluster_prefix(cluster)  # before a connection is made
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise ValueError(f"metadata URL {redact_url(url)!r}: {error}") from None
    opener = _OPENERS.get(scheme)
    if opener is None:
        known = ", ".join(f"{name}://" for name in _OPENERS)
        raise ValueError(f"metadata URL {redact_url(url)!r} has no known scheme; known are {known}")
    return in_cluster(opener(url, _Access(cluster_key, tls_ca)), cluster)


def open_values(
    url: str,
    *,
    ttl_s: float,
    max_bytes: int,
    tls_ca: str = "",
    cluster: str = DEFAULT_CLUSTER,
) -> ValueStore:
    """Open a store of values: at a Redis, else in this process's memory.

    Args:
        url: of a metadata server; ``redis://`` and ``rediss://`` can keep values.
        ttl_s: seconds after which a value ends.
        max_bytes: bytes of one owner's values.
        tls_ca: PEM file of CAs to trust besides the system's, see `tls_trust`.
        cluster: name of the cluster whose values these are.

    Raises:
        ValueError: the URL, the file of CAs, that of a password or the name can't be used.
    """
    if urlsplit(url).scheme in ("redis", "rediss"):
        from halfmoon_metadata.stores.redis_values import RedisValues

        url = with_password_of_file(_with_host(url))
        return RedisValues(
            url,
            ttl_s=ttl_s,
            max_bytes=max_bytes,
            tls_ca=tls_ca,
            prefix=cluster_prefix(cluster),
        )
    return MemoryValues(ttl_s=ttl_s, max_bytes=max_bytes)


def _open_memory(url: str, _: _Access) -> MetadataStore:
    parts = urlsplit(url)
    with _named_lock:
        return _named.setdefault(parts.netloc + parts.path, MemoryStore())


def _open_http(url: str, access: _Access) -> MetadataStore:
    from halfmoon_metadata.stores.http_store import HttpStore

    return HttpStore(
        _with_host(url), token=metadata_token(access.cluster_key), tls_ca=access.tls_ca
    )


def _open_redis(url: str, access: _Access) -> MetadataStore:
    from halfmoon_metadata.stores.redis_store import RedisStore

    return RedisStore(with_password_of_file(_with_host(url)), tls_ca=access.tls_ca)


def _open_etcd(url: str, access: _Access) -> MetadataStore:
    from halfmoon_metadata.stores.etcd_store import EtcdStore

    return EtcdStore(with_password_of_file(_with_host(url)), tls_ca=access.tls_ca)


def _with_host(url: str) -> str:
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ValueError(f"metadata URL {redact_url(url)!r}: {redact_url(str(error))}") from None
    if not named:
        raise ValueError(f"metadata URL {redact_url(url)!r} names no host, or port 0")
    return url


_OPENERS: dict[str, Callable[[str, _Access], MetadataStore]] = {
    "memory": _open_memory,
    "http": _open_http,
    "https": _open_http,
    "redis": _open_redis,
    "rediss": _open_redis,
    "etcd": _open_etcd,
    "etcds": _open_etcd,
}
