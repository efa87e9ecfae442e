"""Store records in etcd, through the JSON gateway that every member serves beside gRPC.

Keys are used as they are, so other programs see the same records. Atomic operations are
transactions. Each write with a lease gets a lease of its own. A record that is written again is
under the newer lease, and the older lease expires empty. etcd counts leases in whole seconds, so
they are rounded up. Its shortest lease is about 2 s unless configured otherwise.

A user and a password in the URL are exchanged for a token, which is shown with each call. etcd ends
tokens after some minutes, with a restart, and when users or roles change. It refuses a call with
such a token before it applies anything. So that call is sent again, once, with a new token.

The gateway needs only HTTP. Of the client libraries on PyPI, etcd3 had its last release in 2020.
aetcd is maintained, but is for asyncio only and requires gRPC.
"""

import math
import threading
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import httpx
import msgspec

from halfmoon_metadata.record_limits import (
    check_key,
    check_listing,
    check_prefix,
    check_ttl,
    check_value,
    next_count,
)
from halfmoon_metadata.store_interface import MetadataError, MetadataRefused, MetadataUnreachable
from halfmoon_metadata.stores.http_call import call_with_retry
from halfmoon_metadata.tls_trust import trust_context

TIMEOUT_S = 5.0
DEFAULT_PORT = 2379
#: Records read per request.
_PAGE = 500
#: Attempts at a counter that other clients change at the same moment.
_COUNT_ATTEMPTS = 1000
#: Words of etcd about a token that it no longer accepts; a new one helps.
_STALE_TOKEN = ("invalid auth token", "revision of auth store is old")
#: Words of etcd about a call without a user, or with a wrong one, and the way out.
_WAYS_OUT = {
    "user name is empty": "it wants a user: write etcd://user:password@host:port",
    "authentication failed": "check the user and password of the URL",
    "authentication is not enabled": "leave user and password out of the URL, or enable them",
    "permission denied": "grant this user's role reading and writing of all keys",
}
T = TypeVar("T", bound="_Answer")


class _Answer(msgspec.Struct):
    """A response to any call. 64-bit numbers are text; zero and empty fields are left out."""


class _Record(msgspec.Struct):
    key: bytes
    value: bytes = b""
    mod_revision: str = "0"


class _Header(msgspec.Struct):
    revision: str = "0"


class _Range(_Answer):
    header: _Header
    kvs: list[_Record] = []
    more: bool = False


class _Deleted(_Answer):
    deleted: str = "0"


class _Txn(_Answer):
    succeeded: bool = False


class _Lease(_Answer):
    ID: str


class _Token(_Answer):
    token: str


class EtcdStore:
    """A `MetadataStore` at a URL such as ``etcd://host:2379`` or ``etcds://user:password@host``.

    Args:
        url: address of a member, or of a proxy; ``etcds`` speaks TLS.
        tls_ca: for ``etcds``, see `trust_context`.
        timeout_s: seconds for one attempt to connect, send, and receive, each.

    Raises:
        ValueError: a URL with a path, a query, or a user without password; or the file of CAs
            can't be used.
    """

    def __init__(self, url: str, *, tls_ca: str = "", timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(url)
        if parts.path not in ("", "/") or parts.query:
            raise ValueError(
                f"metadata URL {parts.scheme}://…{parts.hostname}: only "
                f"{parts.scheme}://user:password@host:port is understood, without path or query"
            )
        if parts.username is not None and not (parts.username and parts.password):
            raise ValueError(
                f"metadata URL {parts.scheme}://…{parts.hostname}: it needs both, a user and a "
                "password, or none"
            )
        is_tls = parts.scheme == "etcds"
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        self._name = f"{parts.scheme}://{host}:{parts.port or DEFAULT_PORT}"
        self._url = f"http{'s' if is_tls else ''}://{host}:{parts.port or DEFAULT_PORT}/v3"
        self._client = httpx.Client(
            timeout=timeout_s, trust_env=False, verify=trust_context(tls_ca) if is_tls else True
        )
        #: Name and password; None without a user.
        self._login = (
            {"name": unquote(parts.username), "password": unquote(parts.password or "")}
            if parts.username
            else None
        )
        #: Token of the user; "" before the first call. Guarded by the lock.
        self._token = ""
        self._token_lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        """See `MetadataStore.get`."""
        check_key(key)
        found = self._read(key)
        return None if found is None else found.value

    def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> None:
        """See `MetadataStore.put`."""
        check_key(key)
        check_value(key, value)
        check_ttl(key, ttl_s)
        self._call("/kv/put", self._record(key, value, ttl_s), _Answer, repeatable=True)

    def delete(self, key: str) -> bool:
        """See `MetadataStore.delete`."""
        check_key(key)
        return self._call("/kv/deleterange", {"key": key.encode()}, _Deleted).deleted != "0"

    def list(self, prefix: str) -> dict[str, bytes]:
        """See `MetadataStore.list`; the result is a snapshot of one moment."""
        check_prefix(prefix)
        first = prefix.encode() or b"\0"
        request = {"key": first, "range_end": _after(prefix.encode()), "limit": _PAGE}
        records: dict[str, bytes] = {}
        while True:
            page = self._call("/kv/range", request, _Range, repeatable=True)
            for each in page.kvs:
                records[each.key.decode(errors="replace")] = each.value
            check_listing(prefix, records)
            if not page.more:
                return records
            request["key"] = page.kvs[-1].key + b"\0"
            request.setdefault("revision", page.header.revision)

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes | None, *, ttl_s: float | None = None
    ) -> bool:
        """See `MetadataStore.compare_and_swap`."""
        check_key(key)
        check_ttl(key, ttl_s)
        if value is not None:
            check_value(key, value)
        is_expected = (
            _is(key, "CREATE", create_revision=0)
            if expected is None
            else _is(key, "VALUE", value=expected)
        )
        return self._swap(key, is_expected, value, ttl_s)

    def increment(self, key: str) -> int:
        """See `MetadataStore.increment`."""
        check_key(key)
        for _ in range(_COUNT_ATTEMPTS):
            found = self._read(key)
            count = next_count(key, None if found is None else found.value)
            revision = "0" if found is None else found.mod_revision
            unchanged = _is(key, "MOD", mod_revision=revision)
            if self._swap(key, unchanged, str(count).encode(), None):
                return count
        raise MetadataUnreachable(
            f"metadata server {self._name}: counter {key!r} was changed by others "
            f"{_COUNT_ATTEMPTS} times in a row"
        )

    def close(self) -> None:
        """See `MetadataStore.close`."""
        self._client.close()

    def _read(self, key: str) -> _Record | None:
        found = self._call("/kv/range", {"key": key.encode()}, _Range, repeatable=True)
        return found.kvs[0] if found.kvs else None

    def _swap(
        self, key: str, condition: dict[str, Any], value: bytes | None, ttl_s: float | None
    ) -> bool:
        if value is None:
            change = {"request_delete_range": {"key": key.encode()}}
        else:
            change = {"request_put": self._record(key, value, ttl_s)}
        request = {"compare": [condition], "success": [change]}
        return self._call("/kv/txn", request, _Txn).succeeded

    def _record(self, key: str, value: bytes, ttl_s: float | None) -> dict[str, Any]:
        record: dict[str, Any] = {"key": key.encode(), "value": value}
        if ttl_s is not None:
            seconds = {"TTL": math.ceil(ttl_s)}
            record["lease"] = self._call("/lease/grant", seconds, _Lease, repeatable=True).ID
        return record

    def _call(
        self, path: str, request: dict[str, Any], kind: type[T], *, repeatable: bool = False
    ) -> T:
        token = self._valid_token(stale="") if self._login else ""
        response = self._send(path, request, token, repeatable=repeatable)
        if self._login and _is_stale(response):
            response = self._send(
                path, request, self._valid_token(stale=token), repeatable=repeatable
            )
        return self._decoded(response, kind)

    def _valid_token(self, *, stale: str) -> str:
        """Return the user's token, a new one if the current one is `stale`."""
        with self._token_lock:
            if self._token == stale:
                assert self._login is not None, "only users have tokens"
                response = self._send("/auth/authenticate", self._login, "", repeatable=True)
                self._token = self._decoded(response, _Token).token
            return self._token

    def _send(
        self, path: str, request: dict[str, Any], token: str, *, repeatable: bool
    ) -> httpx.Response:
        return call_with_retry(
            self._client,
            "POST",
            self._url + path,
            server=self._name,
            repeatable=repeatable,
            headers={"authorization": token} if token else None,
            # msgspec encodes bytes as base64, which the gateway expects.
            body=msgspec.json.encode(request),
        )

    def _decoded(self, response: httpx.Response, kind: type[T]) -> T:
        if response.status_code != 200:
            raise self._failure(response)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.DecodeError as error:
            raise MetadataError(f"{self._name}: the answer is not etcd's: {error}") from None

    def _failure(self, response: httpx.Response) -> MetadataError:
        text = f"metadata server {self._name}: {response.status_code} {response.text[:300]}"
        if ways := [way for words, way in _WAYS_OUT.items() if words in response.text]:
            return MetadataRefused(f"{text}: {ways[0]}")
        if response.status_code >= 500:
            return MetadataUnreachable(text)
        if response.status_code == 400:
            return MetadataRefused(text)
        return MetadataError(text)


def _is_stale(response: httpx.Response) -> bool:
    """Return whether etcd refused the call's token, so that a new one may help."""
    return response.status_code in (400, 401) and any(
        words in response.text for words in _STALE_TOKEN
    )


def _is(key: str, target: str, **what: object) -> dict[str, Any]:
    """Return the condition of a transaction."""
    return {"key": key.encode(), "target": target, "result": "EQUAL", **what}


def _after(prefix: bytes) -> bytes:
    """Return the first key after all keys with this prefix; without prefix, etcd's end key.

    UTF-8 has no byte 255, so the last byte can always be incremented.
    """
    return prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else b"\0"
