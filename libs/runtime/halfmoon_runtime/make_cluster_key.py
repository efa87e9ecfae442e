"""Make the file of a cluster key: `python -m halfmoon_runtime.make_cluster_key FILE`.

It is for orchestrators that give containers a key at their first start. A file that is there stays,
so that it may run at each start. Where HALFMOON_CLUSTER_KEY is set, that key is written instead, in
place of another one. `halfmoon up` makes its key by the same function.
"""

import os
import secrets
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from halfmoon_metadata.cluster_key_source import CLUSTER_KEY_VARIABLE

_N_BYTES = 32


def make_cluster_key(path: Path) -> None:
    """Write a random key into a file of this user alone, unless it exists.

    The file is there whole or not at all, and one that another process writes meanwhile stays.

    Raises:
        OSError: it can't be written.
    """
    if not path.exists():
        _write(path, secrets.token_hex(_N_BYTES))


def _write(path: Path, key: str, *, replace: bool = False) -> None:
    # Made with mode 0600.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as draft:
        draft.write(f"{key}\n")
    try:
        if replace:
            Path(draft.name).replace(path)
        else:
            with suppress(FileExistsError):
                os.link(draft.name, path)
    finally:
        Path(draft.name).unlink(missing_ok=True)


def main() -> None:
    """Make the file that the command line names, or take the key of the environment into it."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m halfmoon_runtime.make_cluster_key FILE")
    path = Path(sys.argv[1])
    if key := os.environ.get(CLUSTER_KEY_VARIABLE, ""):
        _write(path, key, replace=True)
    else:
        make_cluster_key(path)


if __name__ == "__main__":
    main()
