"""Keep values that end by themselves, within a limit for each owner.

A metadata store's records are few and small, and members of a cluster depend on them. These values
may be large and many, so they have stores of their own: no listing sees them, and one owner's
values make room for its own new ones alone.
"""

import re
from typing import Protocol

#: Names of owners and of values.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class ValueStore(Protocol):
    """Store values by owner and name. Calls may wait for a server: keep them off an event loop.

    All methods raise `MetadataError` if the server can't be reached or refuses, and ValueError for
    a name that is not one.
    """

    def put(self, owner: str, name: str, value: bytes) -> bool:
        """Store a value; the owner's oldest ones make room for it.

        Returns:
            False if it alone is larger than an owner's limit, or the server has no room for it
            beside what others keep there: it is not stored.
        """
        ...

    def get(self, owner: str, name: str) -> bytes | None:
        """Return a value; None if it was never there, has ended or has made room."""
        ...

    def delete(self, owner: str, name: str) -> bool:
        """Remove a value; False if it was not there."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


def check_names(*names: str) -> None:
    """Check the names of an owner and a value.

    Raises:
        ValueError: one is empty, longer than 128 characters, or has others than letters, digits
            and ``_.-``.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:40]!r} is no name of a value or its owner")
