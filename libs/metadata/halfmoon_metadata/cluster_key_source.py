"""Read the cluster key from its variable or its file: the one place that does it.

The metadata library is the lowest one that does I/O, so all services, commands and libraries can
call it. What the text means is in `halfmoon_protocol.cluster_keys`.
"""

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path

CLUSTER_KEY_VARIABLE = "HALFMOON_CLUSTER_KEY"
CLUSTER_KEY_FILE_VARIABLE = "HALFMOON_CLUSTER_KEY_FILE"
#: A larger file is a wrong path.
_MAX_FILE_BYTES = 64 * 1024
_OTHERS = stat.S_IRWXG | stat.S_IRWXO

_log = logging.getLogger(__name__)


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
    """Return the text of a key file, without white space around it.

    A file of this user that other users may read or change is refused, as one command repairs it.
    On a read-only mount nothing can be repaired, and orchestrators mount secrets so, readable by
    all in the container. A file of another user, such as root, is that user's decision: it is
    used, with a warning if all users may read it.

    Raises:
        ClusterKeyError: the file can't be read, is empty or too large, or is open to other users.
    """
    what = f"{CLUSTER_KEY_FILE_VARIABLE}: {path!r}"
    try:
        with Path(path).open("rb") as file:
            _check_access(file.fileno(), path, what)
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ClusterKeyError(f"{what} can't be read: {error.strerror or error}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ClusterKeyError(f"{what} has more than {_MAX_FILE_BYTES} bytes: it is no key file")
    try:
        text = content.decode().strip()
    except UnicodeDecodeError:
        raise ClusterKeyError(f"{what} is no text in UTF-8") from None
    if not text:
        raise ClusterKeyError(
            f"{what} is empty: put a key into it, or unset the variable for a cluster without one"
        )
    return text


def _check_access(fd: int, path: str, what: str) -> None:
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode) or not mode & _OTHERS:
        return
    if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        return
    if status.st_uid == os.geteuid():
        raise ClusterKeyError(
            f"{what} may be read or changed by other users (mode {mode:04o}): run `chmod 600 "
            f"{path}`"
        )
    if mode & stat.S_IRWXO:
        _log.warning("%s may be read by all users of this machine (mode %04o)", what, mode)
