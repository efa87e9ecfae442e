"""Copy and checksum bytes in this process, without holding the interpreter lock for long."""

import numpy as np
import xxhash

#: Below this a plain slice assignment is quicker than going through numpy.
_SMALL_BYTES = 64 * 1024


def copy_bytes(destination: memoryview, source: memoryview) -> None:
    """Copy bytes; both views have format "B" and the same length, and may overlap."""
    if len(source) <= _SMALL_BYTES:
        destination[:] = source
    else:
        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))


def checksum(data: memoryview) -> int:
    """Return the xxh3-64 of these bytes."""
    return int(xxhash.xxh3_64_intdigest(data))


def flip_byte(data: memoryview, position: int) -> None:
    """Invert all bits of one byte; only injected faults do this."""
    data[position] ^= 0xFF
