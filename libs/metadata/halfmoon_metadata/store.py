"""The metadata store: small shared records, some of them under a lease.

Who is a member, how a segment is reached, what a checkpoint is made of: little data, read
often, and true only as long as its owner lives. One interface, chosen by URL scheme
(`halfmoon_metadata.open_store`), and one conformance suite for all that implement it.

Calls block (they are short) and are safe from any thread; asyncio code uses
``asyncio.to_thread``.
"""

from typing import Protocol

#: Keys are text, at most so long.
MAX_KEY_CHARS = 512
#: Values are bytes, at most so many.
MAX_VALUE_BYTES = 16 * 1024 * 1024


class MetadataError(Exception):
    """The store could not do it: the text names the store, the key and the cause."""


class MetadataUnreachable(MetadataError):
    """The store did not answer in time; whether a write was applied is unknown."""


class MetadataStore(Protocol):
    """Records by key. Every write is atomic, and a record is read whole or not at all."""

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
        """All live records whose key starts with `prefix`."""
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
        """Add one to a counter (absent: 0) and return it; for generations. Never expires."""
        ...

    def close(self) -> None:
        """Let go of connections. Leases are not touched."""
        ...
