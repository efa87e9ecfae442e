"""Refuse variables on make's command line that a target does not have, with the nearest it has.

Usage: python tools/make_settings.py TARGET SETTING…    (a recipe calls it)

make itself takes any variable: a misspelt one would change nothing, in silence. `HALFMOON_…` is
passed to the services, which know their settings.

Imports the standard library alone: it runs before anything is installed.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

_PASSED_ON = "HALFMOON_"
#: Each word, in which make has put a backslash before a space of the value.
_WORD = re.compile(r"(?:\\.|\S)+")


def variables_of(makeflags: str) -> list[str]:
    """Return the variables of make's command line, as its recipes find them in MAKEFLAGS."""
    _, _, given = f" {makeflags}".partition(" -- ")
    return [word.partition("=")[0].rstrip(":+?!") for word in _WORD.findall(given)]


def complaints(target: str, settings: Sequence[str], variables: Sequence[str]) -> Iterator[str]:
    """Tell of each variable that is no setting, with the way out."""
    for name in variables:
        if name in settings or name.startswith(_PASSED_ON):
            continue
        if near := get_close_matches(name.upper(), settings, 1):
            yield f"{name} is no setting of make {target}: did you mean {near[0]}?"
        else:
            yield (
                f"{name} is no setting of make {target}, which has {', '.join(settings)}."
                f" A variable for another program goes first: {name}=… make {target}"
            )


def main(target: str, *settings: str) -> int:
    """Print what is no setting, and return 2 if anything is."""
    found = [*complaints(target, settings, variables_of(os.environ.get("MAKEFLAGS", "")))]
    for line in found:
        print(line, file=sys.stderr)
    return 2 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
