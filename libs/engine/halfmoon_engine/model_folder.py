"""From a path or hub id to a model's folder, inspected. Imports neither torch nor transformers.

A local folder never touches the network. Of a hub id, first the small files are fetched and
inspected, and its weights only when nothing speaks against them.
"""

import re
from pathlib import Path

from halfmoon_engine.errors import ModelNotFound, one_line
from halfmoon_engine.fake import parse_fake_spec
from halfmoon_engine.inspection.folder import Inspected, inspect_config, inspect_folder
from halfmoon_engine.inspection.foreign_formats import check_path

_SMALL_FILES = ["*.json", "*.jinja", "tokenizer*", "*.model"]
_WEIGHTS = ["*.safetensors"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


def check_model(spec: str) -> None:
    """Check a model as far as it can be without loading it, or fetching weights.

    Args:
        spec: ``fake://…``, or a model's folder or hub id.

    Raises:
        EngineError: the refusal that a worker would end with.
    """
    if spec.startswith("fake://"):
        parse_fake_spec(spec)
    elif (local := _local(spec)) is not None:
        inspect_folder(local, needs_tokenizer=True)
    else:
        inspect_config(_fetch(spec, _SMALL_FILES), needs_tokenizer=True)


def open_folder(path_or_hub_id: str, *, dtype: str = "auto") -> Inspected:
    """Find, or fetch, and inspect a model's folder.

    Raises:
        EngineError: see `inspection.folder.inspect_folder`.
    """
    folder = _local(path_or_hub_id)
    if folder is None:
        inspect_config(_fetch(path_or_hub_id, _SMALL_FILES))
        folder = _fetch(path_or_hub_id, _SMALL_FILES + _WEIGHTS)
    return inspect_folder(folder, dtype=dtype)


def _local(spec: str) -> Path | None:
    """The folder that is meant; None where a hub id is."""
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
        check_path(path)
    if not _HUB_ID.fullmatch(spec):
        raise ModelNotFound(
            f"{one_line(spec, 200)} is not a folder, and not of a hub id's form (NAME/MODEL)"
        )
    return None


def _fetch(hub_id: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except Exception as error:  # a dozen kinds: no such id, no access, no network
        reason = one_line(next(iter(str(error).strip().splitlines()), type(error).__name__), 300)
        raise ModelNotFound(
            f"{hub_id!r} is not a folder here, and as a hub id it can't be fetched: {reason}"
        ) from error
