"""Read a file that holds a secret, such as a key or a password."""

import logging
import os
import stat
from pathlib import Path

#: A larger file is a wrong path.
_MAX_FILE_BYTES = 64 * 1024
_OTHERS = stat.S_IRWXG | stat.S_IRWXO

_log = logging.getLogger(__name__)


class SecretFileError(ValueError):
    """A file of a secret that can't be used; the text names it, and the way out."""


def read_secret_file(path: str, *, what: str) -> str:
    """Return the text of a file, without white space around it; it may be empty.

    A file of this user that other users may read or change is refused, as one command repairs it.
    On a read-only mount nothing can be repaired, and orchestrators mount secrets so, readable by
    all in the container. A file of another user, such as root, is that user's decision: it is
    used, with a warning if all users may read it.

    Args:
        path: of the file.
        what: names it in errors.

    Raises:
        SecretFileError: the file can't be read, is too large or no text, or is open to other users.
    """
    try:
        with Path(path).open("rb") as file:
            _check_access(file.fileno(), path, what)
            content = file.read(_MAX_FILE_BYTES + 1)
    except SecretFileError:
        raise
    except (OSError, ValueError) as error:  # the latter: a path with a zero byte
        reason = getattr(error, "strerror", None) or error
        raise SecretFileError(f"{what} can't be read: {reason}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise SecretFileError(
            f"{what} has more than {_MAX_FILE_BYTES} bytes: it holds no key or password"
        )
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        raise SecretFileError(f"{what} is no text in UTF-8") from None


def _check_access(fd: int, path: str, what: str) -> None:
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode) or not mode & _OTHERS:
        return
    if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        return
    if status.st_uid == os.geteuid():
        raise SecretFileError(
            f"{what} may be read or changed by other users (mode {mode:04o}): run `chmod 600 "
            f"{path}`"
        )
    if mode & stat.S_IRWXO:
        _log.warning("%s may be read by all users of this machine (mode %04o)", what, mode)
