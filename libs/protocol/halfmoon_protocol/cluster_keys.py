"""Split the text of a cluster key into the keys it holds, and name a key by an id.

While a cluster's key is changed, processes have several: the first is the one they prove and serve
with, and they accept all. One line of the text is one key, so a key may contain spaces.
"""

import hashlib
import hmac

#: A shorter key could be guessed, from a recorded proof or from its id.
MIN_KEY_CHARACTERS = 16
#: Keys of one process. Changing a key needs two; each one more is one more try of each proof.
MAX_KEYS = 8
_ID_PURPOSE = b"halfmoon key id 1"
_ID_DIGITS = 16


def split_cluster_keys(text: str) -> tuple[str, ...]:
    """Return the keys in a text, the first one first; none for an empty text.

    Raises:
        ValueError: no key, too many, one too short, or one twice. The text has no part of a key.
    """
    if not text:
        return ()
    keys = tuple(line.strip() for line in text.split("\n") if line.strip())
    if not keys:
        raise ValueError("a cluster key of white space: put a key there, or nothing")
    if len(keys) > MAX_KEYS:
        raise ValueError(f"{len(keys)} cluster keys, one in each line: at most {MAX_KEYS} can be")
    for i, key in enumerate(keys, 1):
        which = "a cluster key" if len(keys) == 1 else f"cluster key {i} of {len(keys)}: a key"
        if len(key) < MIN_KEY_CHARACTERS:
            raise ValueError(
                f"{which} of {len(key)} characters: it needs {MIN_KEY_CHARACTERS} at least, for "
                "example from `openssl rand -hex 32`"
            )
        if key in keys[: i - 1]:
            raise ValueError(f"{which} that is also key {keys.index(key) + 1}: remove one")
    return keys


def cluster_key_id(key: str) -> str:
    """Return the id of one key, 16 hexadecimal digits; "" for no key.

    It tells which of several keys a port serves with, and opens nothing.
    """
    if not key:
        return ""
    return hmac.new(key.encode(), _ID_PURPOSE, hashlib.sha256).hexdigest()[:_ID_DIGITS]
