"""Publish and fetch folders: a checkpoint's files, named by their paths in the folder.

`publish_folder` serves the files in place. `get_folder` fetches into a folder beside the target
and renames it once every file is complete and verified. So a target that exists is whole. (It
does not wait for the disk: after a power failure, fetch it again.)

File names come from the publisher. Before any file is created, each name is checked: it must be
a relative path that stays inside the folder.
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
    """Offer all files of a folder; they must not change until it is unpublished.

    Links to files are followed, links to folders are not; empty folders are left out.

    Raises:
        WrongBuffers: the folder is empty, or a file name can't be sent.
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
    """Return all files below a folder, in the order of their paths."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def get_folder(
    store: P2PStore,
    name: str,
    target: Path,
    *,
    progress: ProgressCallback = lambda n_bytes: None,
) -> GetReport:
    """Fetch a published folder, and serve it until it is dropped.

    Args:
        store: the client.
        name: the object's name.
        target: the folder to create; it must not exist yet, or be empty.
        progress: called with the bytes of each shard that arrived and was verified.

    Raises:
        WrongBuffers: the target exists, or the published object is no folder.
        P2PError: see `P2PStore.get_replica`.
        OSError: the disk is full, or the target can't be written.
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
    """Return a file's path in its folder if it stays inside the folder.

    Raises:
        WrongBuffers: it leads outside, is too long, or holds unprintable characters.
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
    """Create and map a file of this length; its blocks are allocated, so writing can't fail."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x+b") as file:
        if n_bytes == 0:
            return bytearray()
        os.posix_fallocate(file.fileno(), 0, n_bytes)
        return mmap.mmap(file.fileno(), n_bytes)
