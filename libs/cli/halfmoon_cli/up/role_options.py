"""What `halfmoon up -o ROLE.FLAG=VALUE` hands to the processes of a role.

Which settings a role has, and which values they take, its own process says. Here is refused what
the cluster itself decides, with the way to set it.
"""

from collections.abc import Sequence

from halfmoon_cli.up.embedded_cluster import START_ORDER
from halfmoon_runtime.settings import ENVIRONMENT_PREFIX, SECRETS

#: Flags that `halfmoon up` gives to each process, and how they are set.
RESERVED_FLAGS = {
    "worker-id": "halfmoon up names its processes itself",
    "metadata": "all processes meet in one metadata server: use --metadata",
    "model": "all processes serve one model: use --model",
    "served-model-name": "use --name",
    "http-port": "use --port",
}


class BadRoleOption(Exception):
    """An option that can't be passed on; the text says why and what to do."""


def role_options(options: Sequence[str]) -> dict[str, list[str]]:
    """Flags by role.

    Args:
        options: each ROLE.FLAG=VALUE; a flag may be written with `-` or `_`.

    Raises:
        BadOption: one is of another form, or is not the role's to set.
    """
    flags: dict[str, list[str]] = {}
    for text in options:
        head, equals, value = text.partition("=")
        role, dot, flag = head.partition(".")
        flag = flag.replace("_", "-")
        if not (equals and dot and flag and role in START_ORDER):
            raise BadRoleOption(
                f"--option {text!r} is not of the form ROLE.FLAG=VALUE, with one of the roles"
                f" {', '.join(START_ORDER)}"
            )
        if flag in RESERVED_FLAGS:
            raise BadRoleOption(f"--option {role}.{flag}: {RESERVED_FLAGS[flag]}")
        name = flag.replace("-", "_")
        if name in SECRETS:
            raise BadRoleOption(
                f"--option {role}.{flag}: others could read it from the command line; set"
                f" {ENVIRONMENT_PREFIX}{name.upper()}, which all processes get"
            )
        flags.setdefault(role, []).append(f"--{flag}={value}")
    return flags
