"""The metadata store: small shared records, some of them under a lease.

Who is a member, how a segment is reached, what a checkpoint is made of: little data, read
often, and true only as long as its owner lives. One interface, chosen by URL scheme
(`halfmoon_metadata.open_store`), and one conformance suite for all that implement it.

Calls block (they are short) and are safe from any thread; asyncio code uses
``asyncio.to_thread``.

MetadataError
├── MetadataRefused        what was asked is over a limit, or makes no sense for this record
└── MetadataUnreachable    the store did not answer in time
"""

from typing import Protocol

#: Keys are text, at least one character and at most so many.
MAX_KEY_CHARS = 512
#: Values are bytes, at most so many.
MAX_VALUE_BYTES = 16 * 1024 * 1024
#: One `list` gives at most so many records, and so many bytes of keys and values.
MAX_LISTED_RECORDS = 10_000
MAX_LISTED_BYTES = 64 * 1024 * 1024
#: The longest lease, seconds: a day. A record that shall live longer has no lease.
MAX_TTL_S = 86_400.0
#: The largest count that every store can hold.
MAX_COUNT = 2**63 - 1


class MetadataError(Exception):
    """The store could not do it: the text names the store, the key and the cause."""


class MetadataRefused(MetadataError, ValueError):
    """Asking again will not help: the text names what was asked, and the limit."""


class MetadataUnreachable(MetadataError):
    """The store did not answer in time; whether a write was applied is unknown."""


class MetadataStore(Protocol):
    """Records by key. Every write is atomic, and a record is read whole or not at all.

    Every call may raise `MetadataUnreachable`, and `MetadataRefused` for a key, a value or a
    lease outside the limits above.
    """

    def get(self, key: str) -> bytes | None:
        """The value, or None when there is none or its lease has run out."""
        ...

    def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> None:
        """Set the value; with `ttl_s` it is gone so many seconds later unless put again."""
        ...

    def delete(self, key: str) -> bool:
        """Remove the record; whether there was one."""
        ...

    def list(self, prefix: str) -> dict[str, bytes]:
        """All live records whose key starts with `prefix` (taken literally; empty: all).

        Raises:
            MetadataRefused: they are more than `MAX_LISTED_RECORDS` or `MAX_LISTED_BYTES`.
        """
        ...

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes | None, *, ttl_s: float | None = None
    ) -> bool:
        """Set (or with None: remove) the value if it is `expected` now (None: absent).

        Returns:
            Whether it was, and so was changed.
        """
        ...

    def increment(self, key: str) -> int:
        """Add one to a counter (absent: 0) and return it; for generations. Never expires.

        To `get`, a counter is a record of its decimal digits.

        Raises:
            MetadataRefused: the record is not a counter, or is at `MAX_COUNT`.
        """
        ...

    def close(self) -> None:
        """Let go of connections. Leases are not touched."""
        ...
