"""Decide whether the model in a folder can be served, or refuse it in one line."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon_models.bounded_files import MIB, list_files, read_json_object
from halfmoon_models.config_bounds import check_config_bounds
from halfmoon_models.config_parts import text_parts
from halfmoon_models.errors import BrokenCheckpoint, ModelError, UnsupportedModel, one_line
from halfmoon_models.foreign_formats import check_file_names, check_is_folder
from halfmoon_models.machine_memory import machine_memory_bytes
from halfmoon_models.model_kinds import check_kind
from halfmoon_models.quantisation import check_configuration, check_tensors, is_quantised
from halfmoon_models.text_file_checks import check_text_files
from halfmoon_models.weight_files import WeightIndex, read_weights

CONFIG_FILE = "config.json"
_MAX_CONFIG_BYTES = 4 * MIB
_GIB = 1 << 30
#: Bytes of one number, by precision.
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class InspectedModel:
    """A model's folder that passed all checks."""

    folder: Path
    config: Mapping[str, Any]
    weights: WeightIndex


def inspect_folder(
    folder: Path,
    *,
    dtype: str = "auto",
    needs_tokenizer: bool = False,
    quantised: bool = False,
    n_stages: int = 1,
) -> InspectedModel:
    """Decide from a folder's small files and headers whether its model can be served.

    Args:
        folder: of a model in transformers' format.
        dtype: precision of the loaded weights; "auto" is that of the files.
        needs_tokenizer: whether a folder without a tokenizer.json is refused.
        quantised: whether quantised weights pass, for an engine that can tell which it serves.
        n_stages: parts of the weights, of which this machine loads one.

    Raises:
        ModelNotFound: no such folder, or it lacks files.
        BrokenCheckpoint: files are damaged, contradict each other or hold absurd values.
        UnsupportedModel: a model of another kind or format, or larger than this machine.
    """
    check_is_folder(folder)
    names = list_files(folder)
    config = _read_config(folder, names, quantised)
    weights = read_weights(folder)
    if not quantised:
        check_tensors(folder, weights.tensors)
    _check_layers(config, weights)
    packed = is_quantised(config, names, weights.tensors)
    # Quantised weights are computed with as they are.
    n_elements = 0 if packed else weights.n_elements
    check_fits_memory(
        folder,
        n_elements // n_stages,
        weights.n_bytes // n_stages,
        config,
        "" if packed else dtype,
    )
    check_text_files(folder, config, names, needs_tokenizer=needs_tokenizer)
    return InspectedModel(folder, config, weights)


def inspect_config(
    folder: Path, *, needs_tokenizer: bool = False, quantised: bool = False
) -> Mapping[str, Any]:
    """Do the part of `inspect_folder` that needs no weights; return the configuration."""
    names = list_files(folder)
    config = _read_config(folder, names, quantised)
    check_text_files(folder, config, names, needs_tokenizer=needs_tokenizer)
    return config


def _read_config(folder: Path, names: frozenset[str], quantised: bool) -> Mapping[str, Any]:
    check_file_names(folder, names)
    config = read_json_object(folder / CONFIG_FILE, _MAX_CONFIG_BYTES)
    if not quantised:
        check_configuration(folder, config, names)
    try:
        _check_only_one(config)
        check_kind(config)
        check_config_bounds(config)
    except ModelError as error:
        raise type(error)(f"{folder}: {error}") from None
    return config


def _check_only_one(config: Mapping[str, Any]) -> None:
    """Refuse a configuration that leads transformers to another one, which nothing has checked.

    Of the names in `configuration_files` it reads that of its version in place of config.json.
    """
    others = config.get("configuration_files")
    if others is not None and others != [CONFIG_FILE]:
        raise UnsupportedModel(
            f"configuration_files in config.json leads to {one_line(others, 80)}, and "
            "config.json alone is read here: remove that field"
        )


def check_fits_memory(
    folder: Path, n_elements: int, n_bytes: int, config: Mapping[str, Any], dtype: str
) -> None:
    """Refuse weights that this machine's memory can't hold.

    Raises:
        UnsupportedModel: naming both sizes.
    """
    named = config.get("dtype", config.get("torch_dtype")) if dtype == "auto" else dtype
    width = _WIDTHS.get(str(named).removeprefix("torch."))
    needed = n_bytes if width is None else n_elements * width
    there = machine_memory_bytes()
    if there is not None and needed > there:
        raise UnsupportedModel(
            f"{folder} holds {needed / _GIB:.1f} GiB of weights, this machine has "
            f"{there / _GIB:.1f} GiB of memory: use a larger machine or a smaller model"
        )


def _check_layers(config: Mapping[str, Any], weights: WeightIndex) -> None:
    """Refuse more layers than tensors, since each layer has at least one tensor."""
    for _, part in text_parts(config):
        for field in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
            if type(n := part.get(field)) is int and n > len(weights.tensors):
                raise BrokenCheckpoint(
                    f"config.json says that {field} is {n}, the files hold only "
                    f"{len(weights.tensors)} tensors; fetch the model once more"
                )
