"""Define the requests, results and errors that users of this library see.

TransferError
├── Rejected      the peer refused: out of bounds, unknown key, another generation
├── Untrusted     the cluster keys of both sides differ
├── Lost          no path worked: which ones, after how many tries
├── Corrupted     the bytes arrived with another checksum, after all tries
├── TimedOut      the deadline passed first
├── Overloaded    this engine has too many live transfers already
└── Cancelled     the caller cancelled it
"""

from collections.abc import Callable, Generator
from typing import Literal, Protocol

import msgspec

from halfmoon_protocol.regions import Region


class TransferError(Exception):
    """Base of all errors of transfers."""


class Rejected(TransferError):
    """A transfer that the peer refused: out of bounds, unknown key, another generation."""


class Untrusted(TransferError):
    """A transfer between sides whose cluster keys differ; no bytes were moved."""


class Lost(TransferError):
    """A transfer for which no path worked; the text names the paths and counts the tries."""


class Corrupted(TransferError):
    """A transfer with a wrong checksum, after all tries."""


class TimedOut(TransferError):
    """A transfer whose bytes were not all acknowledged before the deadline."""


class Overloaded(TransferError):
    """A transfer beyond the limit of live transfers of this engine; wait for some of them."""


class Cancelled(TransferError):
    """A transfer that the caller cancelled; some bytes may have been written."""


class BackendUnavailable(OSError):
    """A library, driver or device that a backend needs is missing here; the text says which."""


Op = Literal["read", "write"]


class Piece(msgspec.Struct, frozen=True):
    """One contiguous run of a scatter list: `length` bytes between two regions."""

    local: Region
    local_offset: int
    remote: Region
    remote_offset: int
    length: int


class Report(msgspec.Struct, frozen=True):
    """The result of a successful transfer."""

    n_bytes: int
    seconds: float
    #: The backends that moved bytes: ("shm",), ("tcp",), ("tcp", "shm").
    path: tuple[str, ...]
    retries: int


#: Bytes: a notification is for a message about the data, not for data.
MAX_NOTIFICATION_BYTES = 4096


class Notification(msgspec.Struct, frozen=True):
    """A message of a peer, delivered after the bytes of one of its transfers."""

    #: Name of the segment that sent it.
    segment: str
    message: bytes


class Transfer(Protocol):
    """A submitted request. It ends when the peer has acknowledged all bytes, or with an error."""

    def done(self) -> bool:
        """Return whether `result` would return or raise at once."""
        ...

    def result(self, timeout_s: float | None = None) -> Report:
        """Wait, from a thread.

        Raises:
            TransferError: it failed. `TimedOut` also after `timeout_s`; the transfer goes on.
        """
        ...

    def cancel(self) -> None:
        """Ask it to stop; it ends with `Cancelled` unless it was done."""
        ...

    def add_done_callback(self, callback: Callable[["Transfer"], None]) -> None:
        """Call this once it is done, from a thread of the engine (or at once)."""
        ...

    def __await__(self) -> Generator[object, None, Report]:
        """Wait, from asyncio; raises like `result`. Cancelling the waiter doesn't cancel it."""
        ...
