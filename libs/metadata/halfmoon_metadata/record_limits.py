"""Check keys, values and leases against the limits that every store enforces."""

import math
from collections.abc import Mapping

from halfmoon_metadata.store_interface import (
    MAX_COUNT,
    MAX_KEY_CHARS,
    MAX_LISTED_BYTES,
    MAX_LISTED_RECORDS,
    MAX_TTL_S,
    MAX_VALUE_BYTES,
    MetadataRefused,
)


def check_key(key: str) -> None:
    """Raise `MetadataRefused` unless `key` is text of 1 to `MAX_KEY_CHARS` characters."""
    if not key:
        raise MetadataRefused(f"a key is empty, it needs 1 to {MAX_KEY_CHARS} characters")
    check_prefix(key)


def check_prefix(prefix: str) -> None:
    """Raise `MetadataRefused` unless a key could start with `prefix`."""
    if len(prefix) > MAX_KEY_CHARS:
        raise MetadataRefused(
            f"a key of {len(prefix)} characters is over the limit of {MAX_KEY_CHARS}: "
            f"{prefix[:40]!r}…"
        )
    try:
        prefix.encode()
    except UnicodeEncodeError:
        raise MetadataRefused(f"key {prefix!r} is not text that UTF-8 can write") from None


def check_value(key: str, value: bytes) -> None:
    """Raise `MetadataRefused` if `value` is over `MAX_VALUE_BYTES`."""
    if len(value) > MAX_VALUE_BYTES:
        raise MetadataRefused(
            f"the value of {key!r} has {len(value)} bytes, the limit is {MAX_VALUE_BYTES}"
        )


def check_ttl(key: str, ttl_s: float | None) -> None:
    """Raise `MetadataRefused` unless the lease is none, or of 1 ms to `MAX_TTL_S`."""
    if ttl_s is not None and not (math.isfinite(ttl_s) and 0.001 <= ttl_s <= MAX_TTL_S):
        raise MetadataRefused(
            f"a lease of {ttl_s} s for {key!r} is outside 0.001 to {MAX_TTL_S:.0f} s"
        )


def check_listing(prefix: str, records: Mapping[str, bytes]) -> None:
    """Raise `MetadataRefused` if these are too many records, or bytes, for one answer."""
    n_bytes = sum(len(key) + len(value) for key, value in records.items())
    if len(records) > MAX_LISTED_RECORDS or n_bytes > MAX_LISTED_BYTES:
        raise MetadataRefused(
            f"{len(records)} records of {n_bytes} bytes start with {prefix!r}, one listing has "
            f"at most {MAX_LISTED_RECORDS} records of {MAX_LISTED_BYTES} bytes: list a longer "
            "prefix"
        )


def next_count(key: str, value: bytes | None) -> int:
    """Return the counter's next count.

    Raises:
        MetadataRefused: `value` is not a counter, or is `MAX_COUNT`.
    """
    if value is None:
        return 1
    if not (value.isdigit() and len(value) <= 19):
        raise MetadataRefused(f"{key!r} is not a counter: it holds {value[:40]!r}")
    count = int(value) + 1
    if count > MAX_COUNT:
        raise MetadataRefused(f"counter {key!r} is at its limit of {MAX_COUNT}")
    return count
