"""Name the environment's variables that commands read, and find misspelt ones."""

from collections.abc import Iterable

from halfmoon_runtime.setting_names import ENVIRONMENT_PREFIX, misspelt_variables

#: Without their prefix. Services have more settings, which are no misspelt ones of these.
COMMAND_VARIABLES = frozenset(
    {
        *("url", "metadata", "cluster", "state", "traces", "drain_s"),
        *("cluster_key", "cluster_key_file", "tls_ca", "tls_cert", "tls_key"),
    }
)


def misspelt_command_variables(variables: Iterable[str]) -> list[str]:
    """Return a warning for each variable that is nearly one of those that commands read."""
    found = misspelt_variables(variables, COMMAND_VARIABLES, ENVIRONMENT_PREFIX)
    return [f"{name} is read by no command: did you mean {meant}?" for name, meant in found.items()]
