"""Compare KV of two runs: equal bytes, or numbers that are near each other. Pure."""

import struct
from collections.abc import Sequence

#: Largest difference of two numbers, as a share of the larger one or of 1.
_TOLERANCE = 0.05


def near(one: Sequence[Sequence[bytes]], other: Sequence[Sequence[bytes]], dtype: str) -> bool:
    """Return whether two prompts' KV is the same but for rounding."""
    pairs = [
        (a, b)
        for blocks in zip(one, other, strict=True)
        for a, b in zip(*blocks, strict=True)
        if a != b
    ]
    return all(
        abs(x - y) <= _TOLERANCE * max(1.0, abs(x), abs(y))
        for a, b in pairs
        for x, y in zip(_numbers(a, dtype), _numbers(b, dtype), strict=True)
    )


def _numbers(data: bytes, dtype: str) -> Sequence[float]:
    if dtype == "float32":
        return struct.unpack(f"<{len(data) // 4}f", data)
    if dtype == "float16":
        return struct.unpack(f"<{len(data) // 2}e", data)
    wide = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    return struct.unpack(f"<{len(data) // 2}f", wide)
