"""Prove to each other that both sides of a connection know the cluster key.

Both sides send a nonce in their first message, the hello. Then the initiator proves
that it knows the key, and the owner after it. A proof is HMAC-SHA-256 over the prover's role and
both first messages, so over both nonces and both segments. A proof recorded on one connection is
worthless on another.

The key keeps out programs that can only reach a port. TCP also encrypts with keys that depend on
it, see `backends.tcp.record_keys`. RDMA does not: there, an attacker that can change packets in
transit can change later traffic.
"""

import hashlib
import hmac
import secrets
import struct
from enum import Enum

import msgspec

from halfmoon_metadata.cluster_key_source import (
    CLUSTER_KEY_FILE_VARIABLE,
    CLUSTER_KEY_VARIABLE,
    cluster_key_from_environment,
)
from halfmoon_protocol.cluster_keys import split_cluster_keys

NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
_CONTEXT = b"halfmoon transfer 1"


class ProverRole(Enum):
    """The side that proves. It is part of the proof, so a proof can't be sent back to its maker."""

    INITIATOR = b"initiator"
    OWNER = b"owner"
    #: No side: this proof is never sent, and becomes part of the keys of encrypted records.
    RECORDS = b"records"


class ClusterKey(msgspec.Struct, frozen=True):
    """The secret, which is never printed.

    Its text may hold several keys, one in each line, while a cluster's key is changed. The first
    one is used to prove, and an owner accepts proofs of each.
    """

    text: str

    def __post_init__(self) -> None:
        """Refuse no key, and keys that could be guessed."""
        if not split_cluster_keys(self.text):
            raise ValueError("an empty cluster key: without one, pass None")

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys, the one to prove with first."""
        return split_cluster_keys(self.text)

    def __repr__(self) -> str:
        return "ClusterKey(…)"

    @classmethod
    def given(cls, text: str) -> "ClusterKey | None":
        """Return the key in a setting; None when it is empty.

        Raises:
            ValueError: it is too short.
        """
        return cls(text) if text else None

    @classmethod
    def from_environment(cls) -> "ClusterKey | None":
        """Return the key of the environment or its file, for commands that have no settings.

        Raises:
            ValueError: it is too short, or its file can't be used.
        """
        return cls.given(cluster_key_from_environment())

    def prove(self, role: ProverRole, initiator_hello: bytes, owner_hello: bytes) -> bytes:
        """Make a proof of 32 bytes with the first key.

        Args:
            role: the side that proves.
            initiator_hello: the initiator's first message, which contains a nonce.
            owner_hello: the owner's first message, which contains a nonce.
        """
        digest = hmac.new(self.keys[0].encode(), _CONTEXT, hashlib.sha256)
        for part in (role.value, initiator_hello, owner_hello):
            digest.update(struct.pack("<I", len(part)))
            digest.update(part)
        return digest.digest()

    def accepts(
        self, proof: bytes, role: ProverRole, initiator_hello: bytes, owner_hello: bytes
    ) -> bool:
        """Return whether a proof is right for this role and the first key, in constant time."""
        return hmac.compare_digest(proof, self.prove(role, initiator_hello, owner_hello))

    def find_proven(
        self, proof: bytes, role: ProverRole, initiator_hello: bytes, owner_hello: bytes
    ) -> "ClusterKey | None":
        """Return the one of our keys that a proof is made with; None: it is none of ours.

        The rest of the connection uses that key alone: our answer and the keys of records.
        """
        for key in map(ClusterKey, self.keys):
            if key.accepts(proof, role, initiator_hello, owner_hello):
                return key
        return None


def make_nonce() -> bytes:
    """Return random bytes for one connection."""
    return secrets.token_bytes(NONCE_BYTES)


def key_mismatch_hint(where_it_is: str, where_not: str) -> str:
    """Return the error text for a key that one side lacks."""
    return (
        f"a cluster key is set {where_it_is} and none {where_not}: give both sides the same "
        f"{CLUSTER_KEY_VARIABLE} (or {CLUSTER_KEY_FILE_VARIABLE})"
    )
