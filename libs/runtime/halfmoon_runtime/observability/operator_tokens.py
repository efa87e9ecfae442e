"""Derive the operators' bearer tokens from cluster keys.

Commands derive them too: they import no server for it.
"""

import hashlib
import hmac
from collections.abc import Sequence

from halfmoon_protocol.cluster_keys import split_cluster_keys


def operator_token(cluster_key: str) -> str:
    """Derive the operators' bearer token from the first cluster key; "" without one."""
    return next(iter(operator_tokens(cluster_key)), "")


def operator_tokens(cluster_key: str) -> tuple[str, ...]:
    """Derive the tokens that a service accepts: one of each cluster key in the text."""
    return tuple(
        hmac.new(key.encode(), b"halfmoon operator 1", hashlib.sha256).hexdigest()
        for key in split_cluster_keys(cluster_key)
    )


def is_operator_token(shown: str, tokens: Sequence[str]) -> bool:
    """Return whether a text is one of the tokens, in constant time."""
    return any(hmac.compare_digest(shown.encode(), token.encode()) for token in tokens)
