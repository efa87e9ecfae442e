"""Tell whether two peers speak a common version of the protocol.

`hello`, `welcome`, `unwelcome` and `wrong_version` are frames of version 1 for ever, so that peers
of any two versions can say that they don't fit. All further frames have the highest version that
both sides state.
"""

from halfmoon_protocol.codec import VERSION
from halfmoon_protocol.messages import WrongVersion

#: The versions that this build speaks.
MIN_VERSION = VERSION
MAX_VERSION = VERSION


def wrong_version(got: int) -> WrongVersion:
    """Return the answer to a frame, or a hello, of a version that this build does not speak."""
    return WrongVersion(got=got, min_version=MIN_VERSION, max_version=MAX_VERSION)


def version_fault(name: str, lowest: int, highest: int) -> str:
    """Return why a peer can't be talked to; empty if a version is common.

    Args:
        name: of the peer.
        lowest: the first version that it states.
        highest: the last one.
    """
    if lowest <= MAX_VERSION and highest >= MIN_VERSION and lowest <= highest:
        return ""
    return (
        f"{name} speaks protocol versions {lowest} to {highest}, this build {MIN_VERSION} to"
        f" {MAX_VERSION}: run builds with a version in common"
    )
