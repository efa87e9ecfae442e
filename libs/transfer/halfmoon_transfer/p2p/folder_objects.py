"""Folders as objects: a checkpoint's files, named by their paths in the folder.

`publish_folder` serves the files from where they lie; `get_folder` fetches into a folder beside
the target and renames it when all of it is there and right, so that a target that exists is
whole. (It does not wait for the disk: after a power failure, get it again.)

Names come from whoever published, so they are checked before anything is made: a relative path
with nothing in it that could lead elsewhere.
"""

import mmap
import os
import secrets
import shutil
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

from halfmoon_transfer.p2p.object_getter import GetReport, ProgressCallback
from halfmoon_transfer.p2p.object_record import ObjectRecord
from halfmoon_transfer.p2p.p2p_errors import WrongBuffers
from halfmoon_transfer.p2p.p2p_store import P2PStore

_MAX_PATH_CHARS = 1024


def publish_folder(
    store: P2PStore,
    name: str,
    folder: Path,
    *,
    replace: bool = False,
    progress: ProgressCallback = lambda n_bytes: None,
) -> ObjectRecord:
    """Offer all files of a folder; they must stay as they are until it is unpublished.

    Links to files are followed, links to folders are not; empty folders are left out.

    Raises:
        WrongBuffers: there is nothing in it, or a name that can't be sent.
        P2PError, OSError, MetadataError: see `P2PStore.publish`.
    """
    paths = list_files(folder)
    if not paths:
        raise WrongBuffers(f"there is no file in {folder}")
    labels = [path.relative_to(folder).as_posix() for path in paths]
    for label in labels:
        check_file_path(label)
    return store.publish(name, paths, labels=labels, replace=replace, progress=progress)


def list_files(folder: Path) -> list[Path]:
    """All files below a folder, in the order of their paths."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def get_folder(
    store: P2PStore,
    name: str,
    target: Path,
    *,
    progress: ProgressCallback = lambda n_bytes: None,
) -> GetReport:
    """Fetch a folder that was published, and serve it until it is dropped.

    Args:
        store: the client.
        name: of the object.
        target: where it shall be; there must be nothing yet, or an empty folder.
        progress: called with the bytes of each shard that is here and right.

    Raises:
        WrongBuffers: the target exists, or what is published is no folder.
        P2PError: see `P2PStore.get_replica`.
        OSError: there is no room, or it can't be written.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise WrongBuffers(f"{target} exists; a folder is fetched as a whole into a new one")
    record = store.lookup(name)
    labels = _checked_labels(record)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    partial.mkdir()
    try:
        buffers = [
            _make_file(partial / label, size)
            for label, size in zip(labels, record.sizes, strict=True)
        ]
        report = store.get_replica(name, buffers, progress=progress)
        with ExitStack() as undo:
            undo.callback(store.drop, name)
            partial.rename(target)
            undo.pop_all()
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return report


def check_file_path(label: str) -> str:
    """Return a file's path in its folder if it stays in there.

    Raises:
        WrongBuffers: it does not, or would not print.
    """
    parts = label.split("/")
    path = PurePosixPath(label)
    fine = (
        0 < len(label) <= _MAX_PATH_CHARS
        and label.isprintable()
        and not path.is_absolute()
        and not any(part in ("", ".", "..") for part in parts)
    )
    if not fine:
        raise WrongBuffers(f"{label!r:.200} is not the path of a file in a folder")
    return label


def _checked_labels(record: ObjectRecord) -> tuple[str, ...]:
    if not record.labels:
        raise WrongBuffers(f"object {record.name} is not a folder: its buffers have no names")
    labels = tuple(map(check_file_path, record.labels))
    names = set(labels)
    folders = {str(parent) for label in labels for parent in PurePosixPath(label).parents}
    if len(names) != len(labels) or names & folders:
        raise WrongBuffers(
            f"object {record.name} is not a folder: two of its files are in one place"
        )
    return labels


def _make_file(path: Path, n_bytes: int) -> mmap.mmap | bytearray:
    """A new file of this length, mapped; its blocks are there, so that writing can't fail."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x+b") as file:
        if n_bytes == 0:
            return bytearray()
        os.posix_fallocate(file.fileno(), 0, n_bytes)
        return mmap.mmap(file.fileno(), n_bytes)
