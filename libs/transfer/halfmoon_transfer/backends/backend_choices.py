"""Check the backends that an operator lists in a setting."""

from halfmoon_transfer.backends import BACKENDS


def check_backend_choices(choices: str) -> str:
    """Return a list of backends, separated by commas, if all of them are registered.

    A question mark behind a name says that this machine may lack the backend.

    Raises:
        ValueError: a name is not registered; the message lists the names that are.
    """
    for choice in filter(None, map(str.strip, choices.split(","))):
        if choice.removesuffix("?") not in BACKENDS:
            names = ", ".join(sorted(BACKENDS))
            raise ValueError(f"no transfer backend {choice!r}, there are: {names}")
    return choices
