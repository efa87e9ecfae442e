"""What users of this library hold: requests, their outcome, and the errors.

TransferError
├── Rejected      the peer refused: out of bounds, unknown key, another generation
├── Untrusted     the peer has another cluster key, or only one of both has one
├── Lost          no path worked: which ones, after how many tries
├── Corrupted     the bytes arrived with another checksum, after all tries
├── TimedOut      the deadline passed first
├── Overloaded    this engine has too many live transfers already
└── Cancelled     the caller did not want it any more
"""

from collections.abc import Callable, Generator
from typing import Literal, Protocol

import msgspec

from halfmoon_protocol.regions import Region


class TransferError(Exception):
    """The base; nothing that raises it was reported done."""


class Rejected(TransferError):
    """The peer refused: out of bounds, unknown key, another generation."""


class Untrusted(TransferError):
    """The peer has another cluster key, or only one of both has one; nothing was moved."""


class Lost(TransferError):
    """No path worked; the text names them and counts the tries."""


class Corrupted(TransferError):
    """A checksum did not match, after all tries."""


class TimedOut(TransferError):
    """The deadline passed before all bytes were acknowledged."""


class Overloaded(TransferError):
    """This engine has as many live transfers as it allows; wait for some of them."""


class Cancelled(TransferError):
    """The caller cancelled it; some bytes may have been written."""


class BackendUnavailable(OSError):
    """A library, driver or device that a backend needs is missing here; the text says which."""


Op = Literal["read", "write"]


class Piece(msgspec.Struct, frozen=True):
    """One contiguous run of a scatter list: `length` bytes between here and there."""

    local: Region
    local_offset: int
    remote: Region
    remote_offset: int
    length: int


class Report(msgspec.Struct, frozen=True):
    """How a finished transfer went."""

    n_bytes: int
    seconds: float
    #: The backends that moved bytes: ("shm",), ("tcp",), ("tcp", "shm").
    path: tuple[str, ...]
    retries: int


#: A notification is for words about the data, not for data.
MAX_NOTIFICATION_BYTES = 4096


class Notification(msgspec.Struct, frozen=True):
    """A message that a peer had delivered after the bytes of one of its transfers."""

    #: The segment that sent it, as it calls itself.
    segment: str
    message: bytes


class Transfer(Protocol):
    """A submitted request. All its bytes are acknowledged by the far side, or it raises."""

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        ...

    def result(self, timeout_s: float | None = None) -> Report:
        """Wait, from a thread.

        Raises:
            TransferError: it failed; `TimedOut` also when `timeout_s` passed (it goes on).
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
