"""Agree on the keys of one encrypted connection.

Each hello carries an X25519 public key that is made for this connection and then forgotten. So
traffic that was recorded stays secret, even if the cluster key leaks later. The proofs cover both
hellos, and therefore both public keys and the wish to encrypt: neither can be changed in transit.

    secret   X25519 of one side's private and the other side's public key
    salt     HMAC-SHA-256 of the cluster key, made like a proof for the role `records`
    keys     HKDF-SHA-256 of secret and salt, info `halfmoon transfer records 1`, 64 bytes:
             the first 32 are for records of the initiator, the others for records of the owner

A key is used for one direction of one connection only.
"""

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from halfmoon_transfer.backends.tcp.tcp_frames import TcpFrameError
from halfmoon_transfer.cluster_key import ClusterKey, ProverRole

KEY_BYTES = 32
_INFO = b"halfmoon transfer records 1"


class RecordKeys(msgspec.Struct, frozen=True):
    """The keys of both directions, which are never printed."""

    initiator: bytes
    owner: bytes

    def __repr__(self) -> str:
        return "RecordKeys(…)"


class KeyExchange:
    """One side's part in agreeing on the keys of a connection."""

    def __init__(self, private: X25519PrivateKey | None = None) -> None:
        self._private = private or X25519PrivateKey.generate()
        #: The public key, for the hello.
        self.share = self._private.public_key().public_bytes_raw()

    def agree(
        self, key: ClusterKey, share: bytes, initiator_hello: bytes, owner_hello: bytes
    ) -> RecordKeys:
        """Derive the connection's keys.

        Args:
            key: the cluster key that both sides have proven.
            share: the other side's public key.
            initiator_hello: the map of the initiator's hello.
            owner_hello: the map of the owner's hello.

        Raises:
            TcpFrameError: the share is no public key that could be secret.
        """
        try:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(share))
        except ValueError:
            raise TcpFrameError("a share that is no usable X25519 public key") from None
        salt = key.prove(ProverRole.RECORDS, initiator_hello, owner_hello)
        made = HKDF(SHA256(), 2 * KEY_BYTES, salt, _INFO).derive(secret)
        return RecordKeys(made[:KEY_BYTES], made[KEY_BYTES:])
