"""Derive the secrets of CURVE, ZeroMQ's encryption, from the cluster key.

CurveZMQ (https://rfc.zeromq.org/spec/26/) gives each side a long-term key pair of Curve25519. All
ports with one cluster key share one pair, and all callers another. So a process that has the
cluster key needs nothing else, and a record in the metadata server can't name a port of its own.
"""

import hashlib
import hmac
from typing import NamedTuple

_PORT_PURPOSE = b"halfmoon curve port 1"
_CALLER_PURPOSE = b"halfmoon curve caller 1"


class CurveSecrets(NamedTuple):
    """Secret keys of Curve25519, 32 bytes each."""

    port: bytes
    caller: bytes

    def __repr__(self) -> str:
        """Return a text without the secrets."""
        return "CurveSecrets(…)"


def curve_secrets(cluster_key: str) -> CurveSecrets:
    """Return the secrets of one cluster key: HMAC-SHA-256 of each purpose under it."""
    key = cluster_key.encode()
    port, caller = (
        hmac.new(key, purpose, hashlib.sha256).digest()
        for purpose in (_PORT_PURPOSE, _CALLER_PURPOSE)
    )
    return CurveSecrets(port, caller)
