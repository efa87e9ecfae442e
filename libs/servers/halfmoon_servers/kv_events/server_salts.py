"""Name the salts of block hashes as a server takes them, and back.

vLLM 0.32 refuses a `cache_salt` over 128 characters, and one with ``@``, ``/``, a backslash or
NUL. Such a salt is sent as its SHA-256, and remembered to translate the server's KV events.
"""

import hashlib
from collections import OrderedDict

#: Salts that are remembered; those used longest ago are forgotten first.
MAX_SALTS = 65_536
_MAX_CHARACTERS = 128
_REFUSED = frozenset("@/\\\0")
_PREFIX = "halfmoon-sha256:"


class ServerSalts:
    """The salts of one process, shared by its requests and its translators."""

    def __init__(self, max_salts: int = MAX_SALTS) -> None:
        self._max_salts = max_salts
        #: Salts that servers don't take, by what they get.
        self._named: OrderedDict[str, str] = OrderedDict()

    def server_salt(self, salt: str) -> str:
        """Return the salt for a server's `cache_salt`; "": leave that out."""
        if _accepted(salt):
            return salt
        named = _PREFIX + hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest()
        self._named[named] = salt
        self._named.move_to_end(named)
        if len(self._named) > self._max_salts:
            self._named.popitem(last=False)
        return named

    def our_salt(self, server_salt: str) -> str:
        """Return the salt of block hashes; a forgotten one matches no request."""
        return self._named.get(server_salt, server_salt)


def _accepted(salt: str) -> bool:
    return (
        len(salt) <= _MAX_CHARACTERS
        and _REFUSED.isdisjoint(salt)
        and not salt.startswith(_PREFIX)
        and not any("\ud800" <= character <= "\udfff" for character in salt)
    )
