"""Decide whether an access to a region is allowed, and name each reason for a refusal."""

from enum import IntEnum


class AccessStatus(IntEnum):
    """An owner's answer to one access; the numbers are on the wire."""

    OK = 0
    #: Detail: the region's length in bytes.
    OUT_OF_BOUNDS = 1
    UNKNOWN_KEY = 2
    #: Detail: the owner's generation.
    OTHER_GENERATION = 3
    READ_ONLY = 4
    #: The region is not in memory that can be handed to another process.
    NOT_SHAREABLE = 5
    CHECKSUM_MISMATCH = 6
    #: The queue of notifications is full. Detail: its capacity.
    NO_ROOM = 7
    #: The region is a file whose I/O failed. Detail: the system's error number.
    FILE_FAILED = 8
    #: The region is a file that was truncated. Detail: the file's length in bytes.
    FILE_SHRUNK = 9
    #: The region is device memory whose copy failed. Detail: the driver's error number.
    DEVICE_FAILED = 10
    #: The key is a grant's, which allows other ranges, or the other direction.
    NOT_GRANTED = 11


class AccessRefused(Exception):
    """An access that the owner does not allow."""

    def __init__(self, status: AccessStatus, detail: int = 0) -> None:
        super().__init__(status.name)
        self.status = status
        self.detail = detail


def is_within(offset: int, length: int, n_bytes: int) -> bool:
    """Return whether a range lies in a region of `n_bytes`; an empty range may lie at its end."""
    return offset >= 0 and length >= 0 and offset + length <= n_bytes


def access_refusal(
    offset: int, length: int, *, write: bool, n_bytes: int, writable: bool
) -> AccessRefused | None:
    """Return why an access to a region of `n_bytes` is refused, or None if it is allowed."""
    if not is_within(offset, length, n_bytes):
        return AccessRefused(AccessStatus.OUT_OF_BOUNDS, n_bytes)
    if write and not writable:
        return AccessRefused(AccessStatus.READ_ONLY)
    return None
