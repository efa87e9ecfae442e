"""Keep the key of a cluster that runs on this machine, and find it for commands beside it.

`halfmoon up` makes a key at its first start, and keeps it in its state folder:

    .halfmoon/up/cluster-key      of its user alone; locked (flock) while a cluster runs with it

A command that is run in the same folder takes the key from there. It does so while a cluster runs
with it, as a stale key would close other clusters to the command. It does so for addresses of this
machine's loopback alone, as no other machine may see tokens that are made of the key.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from halfmoon_cli.common.cluster_key import read_cluster_key
from halfmoon_metadata.cluster_key_source import CLUSTER_KEY_FILE_VARIABLE, read_cluster_key_file
from halfmoon_runtime.make_cluster_key import make_cluster_key
from halfmoon_runtime.own_address import is_loopback

FILE_NAME = "cluster-key"
#: Variable of another state folder.
STATE_VARIABLE = "HALFMOON_STATE"
#: State folders of the commands that run clusters.
STATE_FOLDERS = (Path(".halfmoon/up"), Path(".halfmoon/route"))

#: Option of the commands that start a cluster.
WithClusterKey = Annotated[
    bool,
    typer.Option(
        "--cluster-key/--no-cluster-key",
        help="Give the cluster a key: HALFMOON_CLUSTER_KEY, or one that is made at the first"
        " start and kept in the state folder",
    ),
]


@contextmanager
def kept_key(folder: Path) -> Iterator[Path]:
    """Yield the file of a state folder's key, which is made if it is not there.

    Commands find the key until the end of the block.

    Raises:
        ClusterKeyError: the file that is there can't be used.
        OSError: it can't be written.
    """
    path = folder.resolve() / FILE_NAME
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    make_cluster_key(path)
    read_cluster_key_file(str(path))
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield path


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
        if _is_in_use(folder / FILE_NAME):
            os.environ[CLUSTER_KEY_FILE_VARIABLE] = str(folder.resolve() / FILE_NAME)
            return


def _is_in_use(path: Path) -> bool:
    """Return whether a key file is this user's, and a cluster runs with it."""
    try:
        with path.open() as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
