"""Parse `halfmoon up -o ROLE.FLAG=VALUE` into flags for the processes of a role.

Each process checks its own settings. Flags that the cluster itself sets are refused here, with the
way to set them.
"""

from collections.abc import Sequence

from halfmoon_cli.up.embedded_cluster import START_ORDER
from halfmoon_runtime.setting_names import ENVIRONMENT_PREFIX, SECRETS

#: Flags that `halfmoon up` sets itself, and how users set them.
RESERVED_FLAGS = {
    "worker-id": "halfmoon up names its processes itself",
    "metadata": "all processes meet in one metadata server: use --metadata",
    "cluster": "all processes are of one cluster: use --cluster",
    "cluster-key-file": "all processes have one cluster key: set HALFMOON_CLUSTER_KEY_FILE",
    "model": "all processes serve one model: use --model",
    "served-model-name": "use --name",
    "http-port": "use --port",
    "group": "halfmoon up names groups itself: use --group",
    "stage": "halfmoon up gives each member its stage: use --group",
    "stage-layers-only": "a member of one stage alone is started by hand; for members use --group",
    "targets": "use --worker, --prefill and --decode",
}

#: Options of `--flexible`, before those of the user.
FLEXIBLE_OPTIONS = (
    "prefill.roles=prefill,decode",
    "decode.roles=prefill,decode",
    "conductor.role-changes=true",
)

#: Further options of `--hybrid`: a worker prefills prompts of any length while it decodes.
ANY_LENGTH = 2**31 - 1
HYBRID_OPTIONS = (
    *FLEXIBLE_OPTIONS,
    f"prefill.local-prefill-tokens={ANY_LENGTH}",
    f"decode.local-prefill-tokens={ANY_LENGTH}",
)


class BadRoleOption(Exception):
    """An option that can't be passed on; the text has the reason and the way out."""


def role_options(
    options: Sequence[str], roles: Sequence[str] = START_ORDER
) -> dict[str, list[str]]:
    """Return the flags of each role.

    Args:
        options: each ROLE.FLAG=VALUE; a flag may be written with `-` or `_`.
        roles: of the processes that there are.

    Raises:
        BadRoleOption: one is of another form, or is not the role's to set.
    """
    flags: dict[str, list[str]] = {}
    for text in options:
        head, equals, value = text.partition("=")
        role, dot, flag = head.partition(".")
        flag = flag.replace("_", "-")
        if not (equals and dot and flag and role in roles):
            raise BadRoleOption(
                f"--option {text!r} is not of the form ROLE.FLAG=VALUE, with one of the roles"
                f" {', '.join(roles)}"
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
