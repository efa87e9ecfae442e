"""Name the environment's variables of settings, and find what a misspelt name meant."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

ENVIRONMENT_PREFIX = "HALFMOON_"
#: Settings that come from the environment only, and are never printed.
SECRETS = frozenset({"cluster_key", "server_api_key"})

#: How alike a variable must be to a setting, 0 to 1. Settings of our services that are alike, such
#: as `disk_mib` and `pool_mib`, are less so: one environment is shared by all of them.
_VARIABLE_LIKENESS = 0.85


def misspelt_variables(
    variables: Iterable[str], settings: Collection[str], prefix: str
) -> dict[str, str]:
    """Return variables that are no setting but nearly one, each with the variable it meant.

    A variable that resembles none may belong to another program: it is not named.

    Args:
        variables: names in the environment.
        settings: names of settings, such as `chunk_tokens`.
        prefix: of variables, such as `HALFMOON_`.
    """
    meant: dict[str, str] = {}
    for variable in variables:
        name = variable.removeprefix(prefix).lower()
        if not variable.startswith(prefix) or name in settings:
            continue
        if nearest := get_close_matches(name, settings, 1, _VARIABLE_LIKENESS):
            meant[variable] = f"{prefix}{nearest[0].upper()}"
    return meant


def unknown_flags(argv: Iterable[str], flags: Collection[str]) -> dict[str, str]:
    """Return flags in `argv` that there are not, each with the nearest that there is, or "".

    Args:
        argv: arguments of a command line.
        flags: all flags that there are, such as `--chunk-tokens`.
    """
    names = [each.partition("=")[0] for each in argv if each.startswith("--") and each != "--"]
    return {
        name: next(iter(get_close_matches(name, flags, 1)), "")
        for name in names
        if name not in flags
    }
