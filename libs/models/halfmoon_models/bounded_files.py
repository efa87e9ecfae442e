"""Read a checkpoint's small files: regular ones only, of bounded size, depth and count."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from halfmoon_models.errors import BrokenCheckpoint, ModelNotFound, one_line

MIB = 1024 * 1024
#: Most files of a folder.
MAX_FILES = 20_000
#: Depth of nested objects and lists; real configurations have less than ten.
MAX_DEPTH = 64
#: Most objects and lists. Large tokenizers have half a million; each takes some hundred bytes.
MAX_PARTS = 4_000_000


def list_files(folder: Path) -> frozenset[str]:
    """Return the names in a folder.

    Raises:
        ModelNotFound: it can't be read.
        BrokenCheckpoint: it has more than `MAX_FILES`.
    """
    names: set[str] = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                names.add(entry.name)
                if len(names) > MAX_FILES:
                    raise BrokenCheckpoint(
                        f"{folder} holds more than {MAX_FILES} files; a model's folder has a few: "
                        "give the model a folder of its own"
                    )
    except OSError as error:
        raise ModelNotFound(f"{folder} can't be read: {error.strerror}") from None
    return frozenset(names)


def check_within(path: Path, folder: Path) -> Path:
    """Return where a path of a model's folder ends, links followed.

    Links must end inside of the folder, or in the blobs of its hub cache: a checkpoint must not
    give access to other files of this machine.

    Raises:
        OSError: nothing is there.
        BrokenCheckpoint: it ends elsewhere.
    """
    real = path.resolve(strict=True)
    if not _belongs(real, folder):
        raise BrokenCheckpoint(
            f"{path} is a link to {real}, outside of the model's folder; put a copy of that "
            "file in the link's place if it is meant"
        )
    return real


def open_regular(path: Path, folder: Path | None = None) -> BinaryIO:
    """Open a regular file of a model's folder.

    Args:
        path: of the file.
        folder: of the model, which links may not leave; None: where the file is.

    Raises:
        ModelNotFound: not there, or not readable.
        BrokenCheckpoint: not a regular file, or a link that leaves the folder.
    """
    try:
        real = check_within(path, folder or path.parent)
        # Without O_NONBLOCK the opening of a named pipe would wait for its writer.
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links is a RuntimeError
        if isinstance(error, BrokenCheckpoint):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFound(f"{path} can't be read: {reason}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BrokenCheckpoint(f"{path} is not a regular file; fetch the model once more")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, max_bytes: int, folder: Path | None = None) -> bytes:
    """Return a file's content.

    Args:
        path: of the file.
        max_bytes: most that it may have.
        folder: see `open_regular`.

    Raises:
        ModelNotFound: it can't be read.
        BrokenCheckpoint: it is larger than `max_bytes`, or a link that leaves the folder.
    """
    with open_regular(path, folder) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise BrokenCheckpoint(
            f"{path} is larger than {max_bytes / MIB:g} MiB, the most that is read of such a "
            "file; fetch the model once more"
        )
    return content


def read_text(path: Path, max_bytes: int, folder: Path | None = None) -> str:
    """Return a file's text; see `read_bytes`.

    Raises:
        ModelNotFound: it can't be read.
        BrokenCheckpoint: see `read_bytes`; or it is not UTF-8.
    """
    try:
        return read_bytes(path, max_bytes, folder).decode()
    except UnicodeDecodeError as error:
        raise BrokenCheckpoint(
            f"{path} is not UTF-8 text (byte {error.start}); fetch the model once more"
        ) from None


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ModelNotFound: it can't be read.
        BrokenCheckpoint: too large, too deep, not JSON, or not an object.
    """
    return parse_json_object(read_text(path, max_bytes), str(path))


def parse_json_object(text: str, place: str) -> dict[str, Any]:
    """Return the JSON object in a text; `place` names it in errors.

    Raises:
        BrokenCheckpoint: too deep, not JSON, or not an object.
    """
    if text.count("{") + text.count("[") > MAX_PARTS:
        raise BrokenCheckpoint(
            f"{place} has more than {MAX_PARTS} JSON objects and lists; no model's file does: "
            "fetch the model from a source that you trust"
        )
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep(place) from None
    except ValueError as error:  # also a number of more digits than Python converts
        raise BrokenCheckpoint(
            f"{place} is not valid JSON ({one_line(error, 120)}); it may have been cut off: fetch "
            "the model once more"
        ) from None
    if not isinstance(value, dict):
        raise BrokenCheckpoint(
            f"{place} holds a JSON {_kind(value)}, where an object is wanted; fetch the model once "
            "more"
        )
    _check_depth(value, place)
    return value


def _check_depth(value: Any, place: str) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [part for one in level for part in _parts(one)]
        if not level:
            return
    raise _too_deep(place)


def _parts(value: Any) -> Iterator[Any]:
    """Return the objects and lists directly below a value."""
    children: Any = ()
    if isinstance(value, dict):
        children = value.values()
    elif isinstance(value, list):
        children = value
    return (child for child in children if isinstance(child, dict | list))


def _too_deep(place: str) -> BrokenCheckpoint:
    return BrokenCheckpoint(
        f"{place} has JSON more than {MAX_DEPTH} levels deep; no model's file does: fetch the "
        "model from a source that you trust"
    )


def _kind(value: Any) -> str:
    names = {list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _belongs(real: Path, folder: Path) -> bool:
    """Check that a file belongs to a folder; the hub's cache links snapshots to its blobs."""
    home = folder.resolve()
    if real.is_relative_to(home):
        return True
    cached = home.parent.name == "snapshots"
    return cached and real.is_relative_to(home.parent.parent / "blobs")
