"""Serve a metadata store over HTTP, in the protocol of Mooncake's engine with additions.

    GET    /metadata?key=K              200 and the value, or 404
    PUT    /metadata?key=K[&ttl_s=S]    200; the body is the value
    DELETE /metadata?key=K              200, or 404

Added: every 200 to a GET of a key carries an ETag. A PUT or DELETE with ``If-Match: <etag>``
(the record has this value) or ``If-None-Match: *`` (there is no record) is a compare-and-swap.
It answers 200, or 412 if nothing was changed; with both it is always 412. A DELETE with
``If-None-Match: *`` only checks.

    GET    /metadata?prefix=P           200 and a JSON map of key to value in base64
    POST   /metadata/increment?key=K    200 and the counter as JSON

With tokens, a request without ``Authorization: Bearer <token>`` is answered with 401.

A bad request is answered with 400, or 413 if it is too large, and a text that names the limit. A
wrong method is answered with 405 and ``Allow``. HEAD is answered as GET, without the body. A change
with an ``Origin`` is answered with 403: it comes from a web page.
`handle_request` is a plain function without a framework. `metadata_app` wraps it as an ASGI
application, which can be mounted in any other.
"""

import asyncio
import base64
import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from halfmoon_metadata.cluster_key_source import CLUSTER_KEY_FILE_VARIABLE, CLUSTER_KEY_VARIABLE
from halfmoon_metadata.record_limits import check_key, check_ttl
from halfmoon_metadata.store_interface import (
    MAX_VALUE_BYTES,
    MetadataError,
    MetadataRefused,
    MetadataStore,
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_TEXT = {"content-type": "text/plain; charset=utf-8"}
_JSON = {"content-type": "application/json"}
_BYTES = {"content-type": "application/octet-stream"}
#: Other parameters are refused, so that a misspelt ttl_s is noticed.
_PARAMETERS = {"key", "prefix", "ttl_s"}
_SWAP_TRIES = 10
#: The methods of each path, for ``Allow``.
_METHODS = {"": ("GET", "HEAD", "PUT", "DELETE"), "/increment": ("POST",)}
#: An ETag as HTTP writes it; ours have 64 hexadecimal digits.
_ETAG = re.compile(r'"[\x21\x23-\x7e]*"')
_NO_TOKEN = (
    f"this cluster has a key: set {CLUSTER_KEY_VARIABLE} (or {CLUSTER_KEY_FILE_VARIABLE}) to it, "
    "or show metadata_token(key) as Authorization: Bearer"
).encode()
_MAX_THREADS = 4


@dataclass(frozen=True)
class MetadataResponse:
    """An HTTP response: status, body and headers."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def value_etag(value: bytes) -> str:
    """Return the ETag of a value; equal ETags mean equal values."""
    return f'"{hashlib.sha256(value).hexdigest()}"'


def handle_request(
    store: MetadataStore,
    method: str,
    path: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    body: bytes,
) -> MetadataResponse:
    """Answer one request.

    Args:
        store: holds the records; called in this thread.
        method: "GET", "PUT", …
        path: path below the mount point: "" or "/", or "/increment".
        query: decoded parameters.
        headers: headers, with names in lower case.
        body: the whole body, at most `MAX_VALUE_BYTES`.
    """
    try:
        return _route(store, method, path.rstrip("/"), query, headers, body)
    except MetadataRefused as error:
        return _refusal(413 if len(body) > MAX_VALUE_BYTES else 400, str(error))
    except MetadataError as error:
        return _refusal(503, str(error))


def _route(
    store: MetadataStore,
    method: str,
    path: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    body: bytes,
) -> MetadataResponse:
    unknown = sorted(query.keys() - _PARAMETERS)
    if unknown:
        return _refusal(400, f"unknown parameter {unknown[0]!r}; known are key, prefix, ttl_s")
    if path not in _METHODS:
        return _refusal(404, f"no such path {path!r}; there are /metadata and /metadata/increment")
    if method not in _METHODS[path]:
        allowed = ", ".join(_METHODS[path])
        refused = _refusal(405, f"{method} is not known here: {allowed}")
        return replace(refused, headers={**refused.headers, "allow": allowed})
    method = "GET" if method == "HEAD" else method
    if path == "" and method == "GET" and "prefix" in query and "key" not in query:
        return _list(store, query["prefix"])
    if "key" not in query:
        return _refusal(400, "the parameter key is missing")
    key = query["key"]
    check_key(key)  # before conditions, which need not ask the store
    match (path, method):
        case ("", "GET"):
            value = store.get(key)
            if value is None:
                return _refusal(404, f"no record {key!r}")
            return MetadataResponse(200, {**_BYTES, "etag": value_etag(value)}, value)
        case ("", "PUT"):
            return _put(store, key, body, _ttl(key, query), headers)
        case ("", "DELETE"):
            return _delete(store, key, headers)
        case ("/increment", "POST"):
            return MetadataResponse(200, _JSON, msgspec.json.encode(store.increment(key)))
    raise AssertionError(f"{method} is listed, and nothing answers it")


def _list(store: MetadataStore, prefix: str) -> MetadataResponse:
    records = store.list(prefix)
    encoded = {key: base64.b64encode(value).decode() for key, value in records.items()}
    return MetadataResponse(200, _JSON, msgspec.json.encode(encoded))


def _put(
    store: MetadataStore, key: str, value: bytes, ttl_s: float | None, headers: Mapping[str, str]
) -> MetadataResponse:
    if "if-match" not in headers and "if-none-match" not in headers:
        store.put(key, value, ttl_s=ttl_s)
        return MetadataResponse(200, {**_TEXT, "etag": value_etag(value)}, b"ok")
    return _swap(store, key, value, ttl_s, headers)


def _delete(store: MetadataStore, key: str, headers: Mapping[str, str]) -> MetadataResponse:
    if "if-match" in headers or "if-none-match" in headers:
        return _swap(store, key, None, None, headers)
    if not store.delete(key):
        return _refusal(404, f"no record {key!r}")
    return MetadataResponse(200, _TEXT, b"ok")


def _swap(
    store: MetadataStore,
    key: str,
    value: bytes | None,
    ttl_s: float | None,
    headers: Mapping[str, str],
) -> MetadataResponse:
    """Compare and swap by the hash of the value: find the value with this hash, then swap it."""
    wanted, absent = headers.get("if-match"), headers.get("if-none-match")
    if wanted is not None and not _ETAG.fullmatch(wanted):
        return _refusal(400, 'If-Match is no ETag: one in quotes, such as "9f86…"')
    if absent not in (None, "*"):
        return _refusal(400, "If-None-Match is not *: no other condition is known")
    if wanted is not None and absent is not None:
        return _refusal(412, "no record has a value and is not there: If-Match or If-None-Match")
    for _ in range(_SWAP_TRIES):
        current = store.get(key) if wanted is not None else None
        if wanted is not None and (current is None or value_etag(current) != wanted):
            break
        if store.compare_and_swap(key, current, value, ttl_s=ttl_s):
            tag = {} if value is None else {"etag": value_etag(value)}
            return MetadataResponse(200, {**_TEXT, **tag}, b"ok")
        if wanted is None:
            break
        # The record changed after the read: check whether it has the wanted value again.
    return _refusal(412, f"record {key!r} is not as expected, nothing was changed")


def _ttl(key: str, query: Mapping[str, str]) -> float | None:
    if "ttl_s" not in query:
        return None
    try:
        ttl_s = float(query["ttl_s"])
    except ValueError:
        raise MetadataRefused(f"ttl_s is {query['ttl_s'][:40]!r}, not seconds") from None
    check_ttl(key, ttl_s)
    return ttl_s


def _refusal(status: int, text: str) -> MetadataResponse:
    return MetadataResponse(status, _TEXT, text.encode(errors="replace"))


def metadata_app(
    store: MetadataStore, *, tokens: Sequence[str] = ()
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Return an ASGI application that serves `store`; mount it at ``/metadata``.

    Args:
        store: holds the records.
        tokens: one of them has to be shown with each request, see `metadata_tokens`; none: nothing
            has to be.

    The store's calls run in threads, so that a slow call delays no other request. These threads
    serve nothing else: leases are renewed however busy the process's other threads are.
    """
    threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="metadata")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if not _shows(scope, tokens):
            response = MetadataResponse(401, {**_TEXT, "www-authenticate": "Bearer"}, _NO_TOKEN)
        elif _is_change_by_page(scope):
            response = _refusal(
                403, "no web page changes metadata: send the request without Origin"
            )
        else:
            response = await _answer(store, scope, receive, threads)
        headers = {**response.headers, "content-length": str(len(response.body))}
        if response.status in (401, 403, 413):
            headers["connection"] = "close"  # the rest of the body is not read
        await send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()],
            }
        )
        is_head = scope["method"] == "HEAD"
        await send({"type": "http.response.body", "body": b"" if is_head else response.body})

    return app


def _shows(scope: Scope, tokens: Sequence[str]) -> bool:
    """Return whether a request shows a token, or none is required. No byte of a body is read."""
    if not tokens:
        return True
    shown = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    return len(shown) == 1 and any(
        hmac.compare_digest(shown[0], f"Bearer {token}".encode()) for token in tokens
    )


def _is_change_by_page(scope: Scope) -> bool:
    """Return whether a browser sends a change for a page, which needs no leave for a plain POST."""
    has_origin = any(name.lower() == b"origin" for name, _ in scope["headers"])
    return has_origin and scope["method"] not in ("GET", "HEAD")


async def _answer(
    store: MetadataStore, scope: Scope, receive: Receive, threads: Executor
) -> MetadataResponse:
    body = bytearray()
    more = scope["method"] == "PUT"  # other methods ignore their body
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return MetadataResponse(400)
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_VALUE_BYTES:
            return _refusal(413, f"a value has at most {MAX_VALUE_BYTES} bytes, this has more")
    try:
        query = dict(parse_qsl(scope["query_string"].decode("ascii"), True, errors="strict"))
    except (UnicodeDecodeError, ValueError):
        return _refusal(400, "the parameters are not UTF-8 that is written in percent codes")
    headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
    # An application that mounts this one puts the prefix into root_path and path.
    path = scope["path"].removeprefix(scope.get("root_path", "")).removeprefix("/metadata")
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(
        threads, handle_request, store, scope["method"], path, query, headers, bytes(body)
    )
