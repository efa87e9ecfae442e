"""Draw numbers that look random and depend on names alone, so that decisions repeat."""

import hashlib


def stable_draw(*names: str) -> int:
    """Return a number below 2^64 that is the same for the same names."""
    digest = hashlib.sha256("\0".join(names).encode()).digest()
    return int.from_bytes(digest[:8], "big")
