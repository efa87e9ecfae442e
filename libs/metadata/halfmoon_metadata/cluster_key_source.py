"""Read the cluster key from its variable or its file: the one place that does it.

The metadata library is the lowest one that does I/O, so all services, commands and libraries can
call it. What the text means is in `halfmoon_protocol.cluster_keys`.
"""

import os
from collections.abc import Mapping

from halfmoon_metadata.secret_file import SecretFileError, read_secret_file

CLUSTER_KEY_VARIABLE = "HALFMOON_CLUSTER_KEY"
CLUSTER_KEY_FILE_VARIABLE = "HALFMOON_CLUSTER_KEY_FILE"


class ClusterKeyError(ValueError):
    """A cluster key that can't be used; the text names where it comes from, and the way out."""


def cluster_key_from_environment(environment: Mapping[str, str] | None = None) -> str:
    """Return the text of the cluster key for programs that have no settings; empty: none is set.

    Args:
        environment: variables by name; None: those of this process.

    Raises:
        ClusterKeyError: both variables are set, or the file can't be used.
    """
    given = os.environ if environment is None else environment
    return choose_cluster_key(
        given.get(CLUSTER_KEY_VARIABLE, ""), given.get(CLUSTER_KEY_FILE_VARIABLE, "")
    )


def choose_cluster_key(key: str, path: str) -> str:
    """Return the key itself, or the text of its file; empty: none is given.

    Raises:
        ClusterKeyError: both are given, or the file can't be used.
    """
    if key and path:
        raise ClusterKeyError(
            f"{CLUSTER_KEY_VARIABLE} and {CLUSTER_KEY_FILE_VARIABLE} are both set: unset one"
        )
    return read_cluster_key_file(path) if path else key


def read_cluster_key_file(path: str) -> str:
    """Return the text of a key file; see `read_secret_file`.

    Raises:
        ClusterKeyError: the file can't be read, is empty or too large, or is open to other users.
    """
    what = f"{CLUSTER_KEY_FILE_VARIABLE}: {path!r}"
    try:
        text = read_secret_file(path, what=what)
    except SecretFileError as error:
        raise ClusterKeyError(str(error)) from None
    if not text:
        raise ClusterKeyError(
            f"{what} is empty: put a key into it, or unset the variable for a cluster without one"
        )
    return text
