"""Find or fetch a model's folder and inspect it, without torch and transformers.

A local folder never touches the network. For a hub id, the small files are fetched and inspected
first, and the weights only if the inspection finds no fault.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfmoon_engine.fake_engine import parse_fake_spec
from halfmoon_models.errors import ModelNotFound, one_line
from halfmoon_models.folder_inspection import InspectedModel, inspect_config, inspect_folder
from halfmoon_models.model_location import local_folder

_SMALL_FILES = ["*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt"]
_WEIGHTS = ["*.safetensors"]


def check_model(spec: str, *, quantised: bool = False) -> Mapping[str, Any]:
    """Check a model as far as possible without loading it or fetching weights.

    Args:
        spec: ``fake://…``, or a model's folder or hub id.
        quantised: see `folder_inspection.inspect_folder`.

    Returns:
        Its configuration; that of a fake model is empty.

    Raises:
        ModelError: the refusal that a worker would end with.
    """
    if spec.startswith("fake://"):
        parse_fake_spec(spec)
        return {}
    if (local := local_folder(spec)) is not None:
        return inspect_folder(local, needs_tokenizer=True, quantised=quantised).config
    folder = _fetch(spec, _SMALL_FILES)
    return inspect_config(folder, needs_tokenizer=True, quantised=quantised)


def open_model_folder(
    path_or_hub_id: str, *, dtype: str = "auto", quantised: bool = False, n_stages: int = 1
) -> InspectedModel:
    """Find, or fetch, and inspect a model's folder.

    Raises:
        ModelError: see `folder_inspection.inspect_folder`.
    """
    folder = local_folder(path_or_hub_id)
    if folder is None:
        inspect_config(_fetch(path_or_hub_id, _SMALL_FILES), quantised=quantised)
        folder = _fetch(path_or_hub_id, _SMALL_FILES + _WEIGHTS)
    return inspect_folder(folder, dtype=dtype, quantised=quantised, n_stages=n_stages)


def _fetch(hub_id: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except Exception as error:  # a dozen kinds: no such id, no access, no network
        reason = one_line(next(iter(str(error).strip().splitlines()), type(error).__name__), 300)
        raise ModelNotFound(
            f"{hub_id!r} is not a folder here, and as a hub id it can't be fetched: {reason}"
        ) from error
