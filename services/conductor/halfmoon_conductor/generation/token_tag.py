"""Hash the tokens of an answer as they come, to compare two computations of it."""

from hashlib import blake2b

_TAG_BYTES = 6


class TokenTag:
    """A short hash of the tokens so far."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=_TAG_BYTES)

    def add(self, token: int) -> None:
        """Add the next token."""
        self._hash.update(token.to_bytes(4))

    def hex(self) -> str:
        """Return the hash, in 12 hex digits."""
        return self._hash.hexdigest()
