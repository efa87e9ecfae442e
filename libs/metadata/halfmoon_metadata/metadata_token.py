"""Derive the token by which clients of a metadata server over HTTP show the cluster key."""

import hashlib
import hmac

_PURPOSE = b"halfmoon metadata 1"


def metadata_token(cluster_key: str) -> str:
    """Return the bearer token of `/metadata`, 64 hexadecimal digits; "" without a cluster key.

    It is HMAC-SHA-256 of a purpose under the key, so that it opens nothing but the metadata.
    """
    if not cluster_key:
        return ""
    return hmac.new(cluster_key.encode(), _PURPOSE, hashlib.sha256).hexdigest()
