"""The extension's face. `ahead[start:end]` is what was read from a connection and not taken yet."""

from typing import Protocol

from typing_extensions import Buffer

class _Region(Protocol):
    @property
    def key(self) -> bytes: ...

class _Slice(Protocol):
    """A piece or slice of `halfmoon_transfer`."""

    @property
    def remote(self) -> _Region: ...
    @property
    def remote_offset(self) -> int: ...

#: Why connections can't be encrypted here; empty if they can.
RECORDS_MISSING: str

class Records:
    """Both directions of one encrypted connection; one thread uses it at a time."""

    def __new__(cls, sending_key: bytes, receiving_key: bytes, limit: int, /) -> Records:
        """Take the keys of 32 bytes, and how many records to seal at most.

        Raises:
            RuntimeError: `RECORDS_MISSING` says why.
        """
    @property
    def counts(self) -> tuple[int, int]:
        """Records sealed and opened so far."""
    def send(self, fd: int, buffers: tuple[Buffer, ...], /) -> None:
        """Seal and send all of these.

        Raises:
            OSError: the connection broke, or the limit is reached (EKEYEXPIRED).
        """
    def receive(self, fd: int, buffer: Buffer, /) -> int:
        """Receive some bytes; 0 when the peer has hung up between records.

        Raises:
            OSError: the connection broke, or a record was changed in transit (EBADMSG).
        """

class Table:
    """The regions of one segment that lie in memory, and the loop that serves them."""

    def __new__(cls, generation: int) -> Table: ...
    def add(self, key: bytes, memory: Buffer, /) -> None:
        """Serve this memory under this key, for reading only if it is read-only.

        Nothing changes when the key is known already. The memory is held until it is removed.
        """
    def remove(self, key: bytes, patience_s: float, /) -> bool:
        """Serve this key no more, and wait for its last access; whether that has ended.

        May be called again, to wait again.
        """
    def cut(self, key: bytes, /) -> None:
        """Shut down the connections that access this key, which may be removed already."""
    def clear(self) -> None:
        """Serve nothing any more."""
    def serve(
        self,
        fd: int,
        records: Records | None,
        ahead: Buffer,
        start: int,
        end: int,
        spin_s: float,
        /,
    ) -> tuple[int, int]:
        """Answer the requests of a greeted connection until one is unusual, or it ends.

        After a small one it looks for the next one for `spin_s` seconds before it sleeps.

        Returns:
            `start` and `end` of what is ahead then; it begins with the unusual request.

        Raises:
            OSError: the connection broke in the middle of something, or stalled there.
        """

def carry(
    fd: int,
    records: Records | None,
    ahead: Buffer,
    start: int,
    end: int,
    spin_s: float,
    write: bool,
    sums: bool,
    number: int,
    generation: int,
    slices: tuple[_Slice, ...],
    local: tuple[memoryview, ...],
    marks: bytearray,
    limits: tuple[int, int, int],
    /,
) -> tuple[int, int, int, int]:
    """Move a batch over a connection, as far as all goes well.

    Args:
        fd: a greeted connection.
        records: what encrypts it.
        ahead: at least 8 KiB.
        start: of what is ahead.
        end: of what is ahead.
        spin_s: how long to look for a reply before sleeping.
        write: or read.
        sums: whether bytes carry checksums.
        number: of the first request; the next ones are one higher each.
        generation: of the peer.
        slices: at most 65,536, with
        local: the bytes of each here.
        marks: a 0 for each slice; becomes 1 when it is applied, 2 when its bytes are damaged.
        limits: bytes and slices of a request, and requests ahead of the first reply.

    Returns:
        `start` and `end` of what is ahead then, and how many requests were sent and answered.
        If these differ the next reply is unusual, and ahead.

    Raises:
        OSError: the connection broke, or its own timeout passed. `marks` are good in either case.
    """

def copy(
    write: bool, slices: tuple[_Slice, ...], local: tuple[memoryview, ...], remote: Buffer, /
) -> bool:
    """Copy a batch between local memory and a mapped region.

    Many written bytes go past the caches: they are for another process.

    Args:
        write: from local memory into the region, or the other way round.
        slices: at most 65,536, with
        local: the bytes of each here.
        remote: the whole region.

    Returns:
        False if a slice is out of the region's bounds; then nothing was copied.

    Raises:
        BufferError: memory to be written is read-only.
    """

def differing(
    slices: tuple[_Slice, ...], local: tuple[memoryview, ...], remote: Buffer, /
) -> list[int]:
    """Return the positions of the slices that have other bytes in a mapped region.

    Args:
        slices: at most 65,536, with
        local: the bytes of each here.
        remote: the whole region.

    Raises:
        ValueError: a slice is out of the region's bounds.
    """
