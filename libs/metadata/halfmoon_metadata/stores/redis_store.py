"""Store records in Redis: leases are its expiries, and atomic operations are scripts.

Keys are used as they are, so other programs see the same records: give the store its own
database. A Redis that evicts (``maxmemory-policy`` other than ``noeviction``) would lose members.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from halfmoon_metadata.record_limits import (
    check_key,
    check_listing,
    check_prefix,
    check_ttl,
    check_value,
)
from halfmoon_metadata.store_interface import (
    MAX_COUNT,
    MAX_LISTED_RECORDS,
    MetadataError,
    MetadataRefused,
    MetadataUnreachable,
)
from halfmoon_metadata.tls_trust import TLS_CA_VARIABLE, certificate_problem, trust_context

TIMEOUT_S = 5.0
#: Keys scanned, and values read, per request.
_BATCH = 500
#: Options of redis-py's URLs that would turn off the verification of certificates, or a part.
_UNVERIFIED = ("ssl_cert_reqs", "ssl_check_hostname", "ssl_exclude_verify_flags")
T = TypeVar("T")

#: Sets KEYS[1] for a lease in ms, or for ever with "0". A Redis whose memory is full refuses SET
#: and takes PEXPIRE, so the lease of the same value is renewed without a SET.
_WRITE = """
local function write(value, lease)
  if redis.call('GET', KEYS[1]) ~= value then
    if lease == '0' then
      redis.call('SET', KEYS[1], value)
    else
      redis.call('SET', KEYS[1], value, 'PX', lease)
    end
  elseif lease == '0' then
    redis.call('PERSIST', KEYS[1])
  else
    redis.call('PEXPIRE', KEYS[1], lease)
  end
end
"""
#: KEYS[1]; ARGV: "1" and the expected value, or "0"; "1" and the new value, or "0"; lease in ms.
_SWAP = (
    _WRITE
    + """
local current = redis.call('GET', KEYS[1])
if ARGV[1] == '1' then
  if current ~= ARGV[2] then return 0 end
elseif current then
  return 0
end
if ARGV[3] == '0' then
  redis.call('DEL', KEYS[1])
else
  write(ARGV[4], ARGV[5])
end
return 1
"""
)
#: KEYS[1]; ARGV: the value; lease in ms.
_PUT = _WRITE + "write(ARGV[1], ARGV[2])"
#: Returns -1 if the record is no counter, or is at its limit.
_INCREMENT = """
local count = redis.pcall('INCR', KEYS[1])
if type(count) == 'table' then return -1 end
redis.call('PERSIST', KEYS[1])
return redis.call('GET', KEYS[1])
"""


class RedisConnection:
    """A client of the Redis at a URL; its errors are those of `MetadataStore`.

    Args:
        url: address of the server, with user and password; ``rediss`` speaks TLS.
        tls_ca: see `trust_context`.
        timeout_s: seconds for one attempt to connect, send, and receive, each.

    Raises:
        ValueError: the URL asks not to verify certificates, or the file of CAs can't be used.
    """

    def __init__(self, url: str, *, tls_ca: str = "", timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(url)
        #: The URL without the password, for error texts.
        self.name = f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}{parts.path}"
        self.client: redis.Redis = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # A broken connection is made again; no call is sent twice.
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 0),
            max_connections=64,
            **_tls_options(url, tls_ca),
        )

    def call(self, call: Callable[[], T]) -> T:
        """Return what a call of the client returns.

        Raises:
            MetadataError: the server can't be reached, or refuses.
        """
        try:
            return call()
        except (redis.AuthenticationError, redis.exceptions.AuthorizationError) as error:
            raise MetadataRefused(
                f"metadata server {self.name} does not accept the user and password of its URL, "
                f"or wants them: {error}"
            ) from error
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if problem := certificate_problem(error):
                raise MetadataRefused(f"metadata server {self.name}: {problem}") from error
            raise MetadataUnreachable(f"metadata server {self.name}: {error}") from error
        except redis.RedisError as error:
            raise MetadataError(f"metadata server {self.name}: {error}") from error


class RedisStore:
    """A `MetadataStore` at a URL such as ``redis://:password@host:6379/0``, or ``rediss://…``.

    Args:
        url: see `RedisConnection`.
        tls_ca: see `trust_context`.
        timeout_s: seconds for one attempt to connect, send, and receive, each.

    Raises:
        ValueError: the URL asks not to verify certificates, or the file of CAs can't be used.
    """

    def __init__(self, url: str, *, tls_ca: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self._redis = RedisConnection(url, tls_ca=tls_ca, timeout_s=timeout_s)
        self._name, self._client = self._redis.name, self._redis.client
        self._call = self._redis.call
        self._swap = self._client.register_script(_SWAP)
        self._put = self._client.register_script(_PUT)
        self._increment = self._client.register_script(_INCREMENT)

    def get(self, key: str) -> bytes | None:
        """See `MetadataStore.get`."""
        check_key(key)
        return self._call(lambda: _value(self._client.get(key)))

    def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> None:
        """See `MetadataStore.put`."""
        check_key(key)
        check_value(key, value)
        check_ttl(key, ttl_s)
        arguments = [value, str(_milliseconds(ttl_s)).encode()]
        self._call(lambda: self._put(keys=[key], args=arguments))

    def delete(self, key: str) -> bool:
        """See `MetadataStore.delete`."""
        check_key(key)
        return bool(self._call(lambda: self._client.delete(key)))

    def list(self, prefix: str) -> dict[str, bytes]:
        """See `MetadataStore.list`. The result is no snapshot: records may change meanwhile."""
        check_prefix(prefix)
        return self._call(lambda: self._list(prefix))

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes | None, *, ttl_s: float | None = None
    ) -> bool:
        """See `MetadataStore.compare_and_swap`."""
        check_key(key)
        check_ttl(key, ttl_s)
        if value is not None:
            check_value(key, value)
        arguments = [*_optional(expected), *_optional(value), str(_milliseconds(ttl_s)).encode()]
        return bool(self._call(lambda: self._swap(keys=[key], args=arguments)))

    def increment(self, key: str) -> int:
        """See `MetadataStore.increment`."""
        check_key(key)
        count = int(self._call(lambda: self._increment(keys=[key])))
        if count < 0:
            raise MetadataRefused(
                f"{self._name}: {key!r} is not a counter, or is at its limit of {MAX_COUNT}"
            )
        return count

    def close(self) -> None:
        """See `MetadataStore.close`."""
        self._client.close()

    def _list(self, prefix: str) -> dict[str, bytes]:
        # SCAN may return a key twice, or a key that is gone when its value is read.
        keys: set[bytes] = set()
        for name in self._client.scan_iter(match=_literal(prefix) + b"*", count=_BATCH):
            keys.add(name if isinstance(name, bytes) else name.encode())
            if len(keys) > MAX_LISTED_RECORDS:
                break
        records: dict[str, bytes] = {}
        for batch in _batches(sorted(keys)):
            for raw, value in zip(batch, self._client.mget(batch), strict=True):
                if isinstance(value, bytes):
                    records[raw.decode(errors="replace")] = value
            check_listing(prefix, records)
        return records


def _tls_options(url: str, tls_ca: str) -> dict[str, Any]:
    """Return the options of connections by TLS; none for a URL without.

    Raises:
        ValueError: the URL asks not to verify certificates, or the file of CAs can't be used.
    """
    parts = urlsplit(url)
    if parts.scheme != "rediss":
        return {}
    if refused := [name for name in _UNVERIFIED if name in parse_qs(parts.query)]:
        raise ValueError(
            f"metadata URL rediss://…{parts.hostname}: {refused[0]} is not taken, as certificates "
            f"are always verified; {TLS_CA_VARIABLE} names a file of CAs to trust"
        )
    trust_context(tls_ca)  # so that a bad file is refused here, by name
    return {"ssl_ca_certs": tls_ca} if tls_ca else {}


def _value(value: object) -> bytes | None:
    assert value is None or isinstance(value, bytes)
    return value


def _optional(value: bytes | None) -> tuple[bytes, bytes]:
    return (b"0", b"") if value is None else (b"1", value)


def _milliseconds(ttl_s: float | None) -> int:
    """Return a lease in milliseconds, as Redis counts it; 0 for none."""
    return 0 if ttl_s is None else max(1, round(1000 * ttl_s))


def _literal(prefix: str) -> bytes:
    """Return the glob pattern that matches exactly the keys with this prefix."""
    special = b"*?[]\\^-"
    return b"".join(
        b"\\" + bytes([byte]) if byte in special else bytes([byte]) for byte in prefix.encode()
    )


def _batches(keys: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [keys[start : start + _BATCH] for start in range(0, len(keys), _BATCH)]
