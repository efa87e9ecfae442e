"""Define the metadata store: small shared records, some of them under a lease.

It holds the members of the cluster, the addresses of segments and the parts of checkpoints. This
is little data, read often, and valid only while its owner lives. The URL scheme chooses the store
(`halfmoon_metadata.open_store`); one conformance suite runs on all of them.

Calls block (they are short) and are safe from any thread; asyncio code uses
``asyncio.to_thread``.

MetadataError
├── MetadataRefused        the call is over a limit, or makes no sense for this record
└── MetadataUnreachable    the store did not answer in time
"""

from typing import Protocol

#: Longest key, in characters; the shortest has one.
MAX_KEY_CHARS = 512
#: Longest value, in bytes.
MAX_VALUE_BYTES = 16 * 1024 * 1024
#: Most records, and most bytes of keys and values, that one `list` returns.
MAX_LISTED_RECORDS = 10_000
MAX_LISTED_BYTES = 64 * 1024 * 1024
#: Longest lease, in seconds: a day. A record that is to live longer has no lease.
MAX_TTL_S = 86_400.0
#: Largest count that every store can hold.
MAX_COUNT = 2**63 - 1


class MetadataError(Exception):
    """A store's failure; the text names the store, the key and the cause."""


class MetadataRefused(MetadataError, ValueError):
    """A call that no retry can make succeed; the text names the argument and the limit."""


class MetadataUnreachable(MetadataError):
    """The store did not answer in time; whether a write was applied is unknown."""


class MetadataStore(Protocol):
    """Store records by key. Every write is atomic, and no read sees half a record.

    Every call may raise `MetadataUnreachable`, and `MetadataRefused` for a key, a value or a
    lease outside the limits above.
    """

    def get(self, key: str) -> bytes | None:
        """Return the value; None if there is no record or its lease has expired."""
        ...

    def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> None:
        """Set the value; with `ttl_s` it expires after that many seconds unless put again."""
        ...

    def delete(self, key: str) -> bool:
        """Remove the record and return whether there was one."""
        ...

    def list(self, prefix: str) -> dict[str, bytes]:
        """Return all live records whose key starts with `prefix` (taken literally; empty: all).

        Raises:
            MetadataRefused: the records are more than `MAX_LISTED_RECORDS` or `MAX_LISTED_BYTES`.
        """
        ...

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes | None, *, ttl_s: float | None = None
    ) -> bool:
        """Set the value if it is `expected` now (None: absent); a value of None removes it.

        Returns:
            Whether the value was as expected, and so was changed.
        """
        ...

    def increment(self, key: str) -> int:
        """Add one to a counter (absent: 0) and return it; for generations. It never expires.

        `get` returns a counter as its decimal digits.

        Raises:
            MetadataRefused: the record is not a counter, or is at `MAX_COUNT`.
        """
        ...

    def close(self) -> None:
        """Close the connections. Leases keep running."""
        ...
