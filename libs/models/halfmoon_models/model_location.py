"""Tell folders from hub ids by their names."""

import re
from pathlib import Path

from halfmoon_models.errors import ModelNotFound, one_line
from halfmoon_models.foreign_formats import check_is_folder

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


def local_folder(spec: str) -> Path | None:
    """Return the folder of a model's name; None if it is a hub id.

    Raises:
        UnsupportedModel: a file of a known kind of weights.
        ModelNotFound: a path where no folder is, or a text that can be neither.
    """
    if not spec or "\0" in spec:
        raise ModelNotFound(f"{spec!r} names no model: give a model's folder or hub id")
    try:
        path = Path(spec).expanduser()
        if path.is_dir():
            return path
        is_path = path.is_absolute() or spec.startswith((".", "~")) or path.exists()
    except (OSError, RuntimeError) as error:  # a name too long, no such user
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFound(f"{one_line(spec, 200)} is not a folder: {reason}") from None
    if is_path:
        check_is_folder(path)
    if not _HUB_ID.fullmatch(spec):
        raise ModelNotFound(
            f"{one_line(spec, 200)} is not a folder, and not of a hub id's form (NAME/MODEL)"
        )
    return None
