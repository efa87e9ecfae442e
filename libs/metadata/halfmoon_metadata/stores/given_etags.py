"""Remember the ETags that a metadata server gave, each with the value that it stands for.

How an ETag is made is the server's business. A condition on a value therefore sends the server's
own ETag of it, and computes one only where the server gave none.
"""

import hashlib
import threading
from collections import OrderedDict

from halfmoon_metadata.http_server import value_etag

#: Keys whose ETag is remembered; the one whose answer is oldest is forgotten first.
_MAX_KEYS = 1024
#: A weak ETag is never equal to another one in `If-Match`.
_WEAK = "W/"


class GivenEtags:
    """The last ETag of each key. Safe from any thread."""

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        #: The digest of a value and the server's ETag of it, by key. At most `max_keys`.
        self._given: OrderedDict[str, tuple[bytes, str]] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, key: str, value: bytes, etag: str | None) -> None:
        """Remember what a server's answer said of a value; without an ETag, forget the key."""
        digest = hashlib.sha256(value).digest()
        with self._lock:
            self._given.pop(key, None)
            if etag and not etag.startswith(_WEAK):
                self._given[key] = digest, etag
                if len(self._given) > self._max_keys:
                    self._given.popitem(last=False)

    def etag_of(self, key: str, value: bytes) -> str:
        """Return the ETag that the server gave for this value, or else compute it."""
        with self._lock:
            digest, etag = self._given.get(key, (b"", ""))
        return etag if digest == hashlib.sha256(value).digest() else value_etag(value)

    def check(self) -> None:
        """Assert that no more is remembered than may be."""
        assert len(self._given) <= self._max_keys
