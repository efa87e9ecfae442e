"""Make the file of a cluster key, and of what else a cluster's first start needs.

    python -m halfmoon_runtime.make_cluster_key FILE [TOKEN_FILE [PASSWORD_FILE]]

It is for orchestrators that give containers a key at their first start. A file that is there stays,
so that it may run at each start. Where HALFMOON_CLUSTER_KEY is set, that key is written instead, in
place of another one. `halfmoon up` makes its key by the same function.

TOKEN_FILE gets the operators' token of that key, which all users may read: Prometheus finds its
targets with it, and can't make the key of it. A folder that only the right containers mount keeps
it from others.

PASSWORD_FILE gets a random password for a Redis of the cluster's own, unless it exists. The file
beside it, with `.conf`, gets the line of Redis's configuration. All users may read both: Redis runs
as a user of its own.
"""

import os
import secrets
import sys
from pathlib import Path

from halfmoon_metadata.cluster_key_source import CLUSTER_KEY_VARIABLE, read_cluster_key_file
from halfmoon_metadata.whole_file import PRIVATE, create_file, replace_file
from halfmoon_runtime.observability.operator_tokens import operator_token

_N_BYTES = 32
_READABLE = 0o644


def make_cluster_key(path: Path) -> None:
    """Write a random key into a file of this user alone, unless it exists.

    The file is there whole or not at all, and one that another process writes meanwhile stays.

    Raises:
        OSError: it can't be written.
    """
    _write_random(path)


def write_operator_token(path: Path, key_path: Path) -> None:
    """Write the operators' token of a key file into a file that all users may read.

    Raises:
        OSError: it can't be written.
        ValueError: the key can't be read, or is none that services take.
    """
    _write(path, operator_token(read_cluster_key_file(str(key_path))), mode=_READABLE)


def make_redis_password(path: Path) -> None:
    """Write a random password, unless it exists, and Redis's configuration with it.

    Raises:
        OSError: they can't be written.
    """
    _write_random(path)
    path.chmod(_READABLE)
    config = path.with_name(f"{path.name}.conf")
    _write(config, f"requirepass {path.read_text().strip()}", mode=_READABLE)


def _write_random(path: Path) -> None:
    if not path.exists():
        create_file(path, f"{secrets.token_hex(_N_BYTES)}\n".encode())


def _write(path: Path, line: str, *, mode: int = PRIVATE) -> None:
    replace_file(path, f"{line}\n".encode(), mode=mode)


def main() -> None:
    """Make the files that the command line names, from the key of the environment if it has one."""
    if not 2 <= len(sys.argv) <= 4:
        sys.exit(
            "usage: python -m halfmoon_runtime.make_cluster_key FILE [TOKEN_FILE [PASSWORD_FILE]]"
        )
    path, *others = map(Path, sys.argv[1:])
    if key := os.environ.get(CLUSTER_KEY_VARIABLE, ""):
        _write(path, key)
    else:
        make_cluster_key(path)
    if others:
        try:
            write_operator_token(others[0], path)
        except ValueError as error:
            sys.exit(f"no operators' token: {error}")
    for password in others[1:]:
        make_redis_password(password)


if __name__ == "__main__":
    main()
