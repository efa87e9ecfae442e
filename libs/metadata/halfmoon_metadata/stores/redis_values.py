"""Keep values in Redis: three keys for each owner, changed by scripts.

A hash has the values, a sorted set the times of their ends, and another hash their sizes with the
sum under the empty name. The three expire together with the newest value.

Members of the cluster keep their records in the same server, where a full memory (``maxmemory``)
refuses new ones. So values leave a part of it free: an owner's older ones make room, and where that
is not enough a value is not kept.
"""

from collections.abc import Callable
from typing import TypeVar

from halfmoon_metadata.stores.redis_store import RedisConnection
from halfmoon_metadata.value_store import check_names

T = TypeVar("T")

_PREFIX = "halfmoon-values"
#: Share of the server's memory, in percent, above which no value is added. Other keys count too.
_MAX_MEMORY_PERCENT = 75
#: What the scripts share. KEYS: values, ends, sizes.
_COMMON = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local total = tonumber(redis.call('HGET', KEYS[3], '') or '0')
local function drop(name)
  local size = redis.call('HGET', KEYS[3], name)
  if not size then return 0 end
  total = total - tonumber(size)
  redis.call('HDEL', KEYS[1], name)
  redis.call('HDEL', KEYS[3], name)
  redis.call('ZREM', KEYS[2], name)
  redis.call('HSET', KEYS[3], '', total)
  return 1
end
"""
#: ARGV: name, value, milliseconds to its end, most bytes, most percent of the server's memory.
#: INFO may be forbidden to this user; then the server's memory is not known.
_PUT = (
    _COMMON
    + """
local function is_tight()
  local info = redis.pcall('INFO', 'memory')
  if type(info) ~= 'string' then return false end
  local most = tonumber(string.match(info, 'maxmemory:(%d+)') or '0')
  local used = tonumber(string.match(info, 'used_memory:(%d+)') or '0')
  return most > 0 and used + #ARGV[2] > most * tonumber(ARGV[5]) / 100
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do drop(name) end
drop(ARGV[1])
while total > 0 and total + #ARGV[2] > tonumber(ARGV[4]) do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
  if not oldest then break end
  drop(oldest)
end
while is_tight() do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
  if not oldest then return 0 end
  drop(oldest)
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[3], ARGV[1], #ARGV[2], '', total + #ARGV[2])
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[3]) end
return 1
"""
)
#: ARGV: name.
_GET = (
    _COMMON
    + """
local ends = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not ends or tonumber(ends) <= now then return false end
return redis.call('HGET', KEYS[1], ARGV[1])
"""
)
_DELETE = (
    _COMMON
    + """
local ends = redis.call('ZSCORE', KEYS[2], ARGV[1])
local was = drop(ARGV[1])
if ends and tonumber(ends) > now then return was end
return 0
"""
)


class RedisValues:
    """A `ValueStore` at a Redis of version 5 or later.

    Args:
        url: as of `RedisStore`.
        ttl_s: seconds after which a value ends.
        max_bytes: bytes of one owner's values.
        tls_ca: see `tls_trust`.
        prefix: stands before all keys, see `cluster_namespace`.

    Raises:
        ValueError: as of `RedisStore`.
    """

    def __init__(
        self, url: str, *, ttl_s: float, max_bytes: int, tls_ca: str = "", prefix: str = ""
    ) -> None:
        self._prefix = prefix
        self._ttl_ms = max(1, round(1000 * ttl_s))
        self._max_bytes = max_bytes
        self._redis = RedisConnection(url, tls_ca=tls_ca)
        self._put = self._redis.client.register_script(_PUT)
        self._get = self._redis.client.register_script(_GET)
        self._delete = self._redis.client.register_script(_DELETE)

    def put(self, owner: str, name: str, value: bytes) -> bool:
        """See `ValueStore.put`."""
        check_names(owner, name)
        if len(value) > self._max_bytes:
            return False
        arguments: list[str | bytes | int] = [
            name,
            value,
            self._ttl_ms,
            self._max_bytes,
            _MAX_MEMORY_PERCENT,
        ]
        return bool(self._call(lambda: self._put(keys=self._keys(owner), args=arguments)))

    def get(self, owner: str, name: str) -> bytes | None:
        """See `ValueStore.get`."""
        check_names(owner, name)
        value = self._call(lambda: self._get(keys=self._keys(owner), args=[name]))
        return value if isinstance(value, bytes) else None

    def delete(self, owner: str, name: str) -> bool:
        """See `ValueStore.delete`."""
        check_names(owner, name)
        return bool(self._call(lambda: self._delete(keys=self._keys(owner), args=[name])))

    def close(self) -> None:
        """See `ValueStore.close`."""
        self._redis.client.close()

    def _call(self, call: Callable[[], T]) -> T:
        return self._redis.call(call)

    def _keys(self, owner: str) -> list[str]:
        # In braces: a Redis cluster keeps the three in one place.
        start = f"{self._prefix}{_PREFIX}:{{{owner}}}"
        return [f"{start}:{part}" for part in ("values", "ends", "sizes")]
