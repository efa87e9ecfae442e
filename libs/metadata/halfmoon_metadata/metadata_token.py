"""Derive the token by which clients of a metadata server over HTTP show the cluster key."""

import hashlib
import hmac

from halfmoon_protocol.cluster_keys import split_cluster_keys

_PURPOSE = b"halfmoon metadata 1"


def metadata_token(cluster_key: str) -> str:
    """Return the bearer token of `/metadata`, 64 hexadecimal digits; "" without a cluster key.

    It is HMAC-SHA-256 of a purpose under the first key, so that it opens nothing but the metadata.
    """
    return next(iter(metadata_tokens(cluster_key)), "")


def metadata_tokens(cluster_key: str) -> tuple[str, ...]:
    """Return the tokens that a metadata server accepts: one of each key in the text."""
    return tuple(
        hmac.new(key.encode(), _PURPOSE, hashlib.sha256).hexdigest()
        for key in split_cluster_keys(cluster_key)
    )
