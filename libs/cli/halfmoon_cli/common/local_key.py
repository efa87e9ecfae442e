"""Keep the key of a cluster that runs on this machine, and find it for commands beside it.

`halfmoon up` makes a key at its first start, and keeps it in its state folder:

    .halfmoon/up/cluster-key      of its user alone; locked (flock) while a cluster runs with it

A command that is run in the same folder takes it from there, while a cluster runs with it, and for
an address of this machine's loopback alone: a stale key would close other clusters to it, and the
tokens that are made of a key are no other machine's to see.
"""

import fcntl
import ipaddress
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from halfmoon_cli.common.cluster_key import CLUSTER_KEY_VARIABLE, read_cluster_key

FILE_NAME = "cluster-key"
#: Variable of another state folder.
STATE_VARIABLE = "HALFMOON_STATE"
#: State folders of the commands that run clusters.
STATE_FOLDERS = (Path(".halfmoon/up"), Path(".halfmoon/route"))
_N_BYTES = 32
_OTHERS = 0o077


class UnsafeKeyFile(Exception):
    """A file whose key can't be used; the text names it, the reason and the way out."""


@contextmanager
def kept_key(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file of a state folder's key and the key; make them if they are not there.

    Commands find the key until the end of the block.

    Raises:
        UnsafeKeyFile: other users of the machine can read it, or it is too short.
        OSError: it can't be written or read.
    """
    path = folder / FILE_NAME
    folder.mkdir(0o700, parents=True, exist_ok=True)
    if not path.exists():
        _make(path)
    with path.open() as file:
        if os.fstat(file.fileno()).st_mode & _OTHERS:
            raise UnsafeKeyFile(
                f"{path} can be read by other users of this machine: delete it, and a new key is"
                f" made, or keep it with `chmod 600 {path}`"
            )
        key = file.read().strip()
        if len(key) < _N_BYTES:
            raise UnsafeKeyFile(
                f"{path} has {len(key)} characters, and a key has {_N_BYTES} at least: delete it,"
                " and a new key is made"
            )
        fcntl.flock(file, fcntl.LOCK_SH)
        yield path, key


def use_local_key(address: str) -> None:
    """Set this process's environment to the key of a cluster that was started in this folder.

    Nothing changes if the environment has a key, if no cluster runs with a kept one, or if the
    address is not this machine's loopback.

    Args:
        address: URL of the conductor or the metadata server that is to be called.
    """
    if read_cluster_key() or not is_loopback(urlsplit(address).hostname or ""):
        return
    chosen = os.environ.get(STATE_VARIABLE)
    for folder in [Path(chosen)] if chosen else STATE_FOLDERS:
        if key := _key_in_use(folder / FILE_NAME):
            os.environ[CLUSTER_KEY_VARIABLE] = key
            return


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _make(path: Path) -> None:
    """Write a new key, whole or not at all; one that another process has written stays."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=FILE_NAME) as draft:
        draft.write(f"{secrets.token_hex(_N_BYTES)}\n")
        draft.flush()
        with suppress(FileExistsError):
            os.link(draft.name, path)


def _key_in_use(path: Path) -> str:
    """Return the key in a file that is locked and is this user's alone; else ""."""
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
                return ""
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip()
    except (OSError, ValueError):
        return ""
    return ""
