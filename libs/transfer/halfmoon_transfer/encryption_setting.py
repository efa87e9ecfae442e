"""Define the setting that turns off the encryption of TCP, for networks that are trusted."""

import os

ENCRYPTION_VARIABLE = "HALFMOON_TRANSFER_ENCRYPTION"


def encryption_from_environment() -> bool:
    """Return whether HALFMOON_TRANSFER_ENCRYPTION asks for encryption, as it does when unset.

    Raises:
        ValueError: it is neither `on` nor `off`.
    """
    text = os.environ.get(ENCRYPTION_VARIABLE, "") or "on"
    if text not in ("on", "off"):
        raise ValueError(f"{ENCRYPTION_VARIABLE} is {text!r:.40}, it is on or off")
    return text == "on"


def encryption_mismatch_hint(where_it_is: str, where_not: str) -> str:
    """Return the error text for sides of which only one encrypts."""
    return (
        f"transfer encryption is on {where_it_is} and off {where_not}: give both sides the same "
        f"{ENCRYPTION_VARIABLE}"
    )
