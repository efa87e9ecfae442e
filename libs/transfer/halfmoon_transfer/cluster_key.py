"""The cluster key: what engines of one cluster know, and how they prove it to each other.

Both sides of a connection send a nonce with their first words (`asked` and `answered`). Then
the one who dialled proves first that it knows the key, and the owner after it: with
HMAC-SHA-256 over who proves and all that both have said, so with both nonces and both segments.
What was recorded on one connection proves nothing on another one.

The key keeps out who can reach a port. It does not encrypt, and whoever can change packets on
the way can still change what follows.
"""

import hashlib
import hmac
import os
import secrets
import struct
from enum import Enum

import msgspec

NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
#: A short one could be guessed from a recorded proof.
MIN_CHARACTERS = 16
ENVIRONMENT_VARIABLE = "HALFMOON_CLUSTER_KEY"
_CONTEXT = b"halfmoon transfer 1"


class ProverRole(Enum):
    """Who proves; nobody's proof can be sent back to its maker."""

    INITIATOR = b"initiator"
    OWNER = b"owner"


class ClusterKey(msgspec.Struct, frozen=True):
    """The secret itself, which is not printed."""

    text: str

    def __post_init__(self) -> None:
        """Refuse what can be guessed."""
        if len(self.text) < MIN_CHARACTERS:
            raise ValueError(
                f"a cluster key of {len(self.text)} characters: it needs {MIN_CHARACTERS} at "
                "least, for example from `openssl rand -hex 32`"
            )

    def __repr__(self) -> str:
        return "ClusterKey(…)"

    @classmethod
    def given(cls, text: str) -> "ClusterKey | None":
        """The key that a setting holds; None when it is empty.

        Raises:
            ValueError: it is too short.
        """
        return cls(text) if text else None

    @classmethod
    def from_environment(cls) -> "ClusterKey | None":
        """What HALFMOON_CLUSTER_KEY says, for commands that have no settings.

        Raises:
            ValueError: it is too short.
        """
        return cls.given(os.environ.get(ENVIRONMENT_VARIABLE, ""))

    def prove(self, role: ProverRole, asked: bytes, answered: bytes) -> bytes:
        """32 bytes that only who knows the key can make.

        Args:
            role: who proves.
            asked: the first words of who dialled, with a nonce in them.
            answered: the owner's first words, with a nonce in them.
        """
        digest = hmac.new(self.text.encode(), _CONTEXT, hashlib.sha256)
        for part in (role.value, asked, answered):
            digest.update(struct.pack("<I", len(part)))
            digest.update(part)
        return digest.digest()

    def accepts(self, proof: bytes, role: ProverRole, asked: bytes, answered: bytes) -> bool:
        """Whether somebody in this role made it; takes as long for any wrong one."""
        return hmac.compare_digest(proof, self.prove(role, asked, answered))


def make_nonce() -> bytes:
    """Random bytes that nobody has heard before."""
    return secrets.token_bytes(NONCE_BYTES)


def key_mismatch_hint(where_it_is: str, where_not: str) -> str:
    """The words for a key that one side lacks."""
    return (
        f"a cluster key is set {where_it_is} and none {where_not}: give both sides the same "
        f"{ENVIRONMENT_VARIABLE}"
    )
