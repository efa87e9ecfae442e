"""Read the cluster's key, which commands take from the environment alone."""

import os

CLUSTER_KEY_VARIABLE = "HALFMOON_CLUSTER_KEY"


def read_cluster_key() -> str:
    """Return the cluster's key; empty if there is none. An option would show it to `ps`."""
    return os.environ.get(CLUSTER_KEY_VARIABLE, "")
