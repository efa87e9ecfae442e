"""Replace files whole, and change one file from several processes in turn.

A reader, or a start after a power cut, finds the old content or the new one: the new one is written
to a draft in the same folder, which then takes the file's name.
"""

import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

#: Permissions of a file that may hold a secret: its owner's alone.
PRIVATE = 0o600


@contextmanager
def replacing_file(
    path: Path, *, new_mode: int = PRIVATE, mode: int | None = None, durable: bool = True
) -> Iterator[BinaryIO]:
    """Open a draft for writing, which replaces a file at the end; an error leaves the file alone.

    An existing file keeps its permissions and its owner. A symbolic link stays, and its target is
    replaced. What is no regular file, such as ``/dev/stdout``, is written to directly.

    Args:
        path: the file.
        new_mode: permissions of a file that is new, less those that the umask takes away.
        mode: permissions in either case; None: see above.
        durable: whether it is there after a power cut, too.

    Raises:
        OSError: the draft can't be written or take the file's name, or the owner can't be kept.
    """
    before = _status(path)
    if before is not None and not stat.S_ISREG(before.st_mode):
        with path.open("wb") as target:
            yield target
        return
    path = Path(os.path.realpath(path))
    draft = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.draft")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(draft, flags, new_mode if before is None else PRIVATE)
    try:
        with os.fdopen(fd, "wb") as target:
            yield target
            target.flush()
            if before is not None:
                _keep_owner(fd, before)
                os.fchmod(fd, stat.S_IMODE(before.st_mode))
            if mode is not None:
                os.fchmod(fd, mode)
            if durable:
                os.fsync(fd)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if durable:
        _sync_folder(path.parent)


def replace_file(
    path: Path,
    content: bytes,
    *,
    new_mode: int = PRIVATE,
    mode: int | None = None,
    durable: bool = True,
) -> None:
    """Write a file whole; see `replacing_file`."""
    with replacing_file(path, new_mode=new_mode, mode=mode, durable=durable) as draft:
        draft.write(content)


def create_file(path: Path, content: bytes) -> None:
    """Write a file of this user alone, unless it is there or comes meanwhile.

    Raises:
        OSError: it can't be written.
    """
    draft = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.draft")
    replace_file(draft, content)
    try:
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the right to change a file, and wait while another process has it.

    The lock is on a file beside it, ``.NAME.lock``, which stays: the file itself is replaced.

    Raises:
        OSError: the file of the lock can't be made.
    """
    path = Path(os.path.realpath(path))
    lock = path.with_name(f".{path.name[:200]}.lock")
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _keep_owner(fd: int, before: os.stat_result) -> None:
    ours = os.fstat(fd)
    if (ours.st_uid, ours.st_gid) != (before.st_uid, before.st_gid):
        os.fchown(fd, before.st_uid, before.st_gid)


def _sync_folder(folder: Path) -> None:
    """Make the new name outlive a power cut, where the file system can."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
