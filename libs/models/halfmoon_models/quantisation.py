"""Recognise and refuse quantised checkpoints by their configuration, files, or tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfmoon_models.config_parts import nested_parts
from halfmoon_models.errors import UnsupportedModel, one_line
from halfmoon_models.safetensors_header import TensorEntry

#: Files that quantising tools write beside config.json.
QUANTISATION_FILES = {
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
    "quantization_config.json": "",
    "hf_quant_config.json": "ModelOpt",
}
_METHODS = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "modelopt": "ModelOpt",
    "compressed-tensors": "compressed-tensors",
    "torchao": "torchao",
    "mxfp4": "MXFP4",
    "eetq": "EETQ",
    "hqq": "HQQ",
    "quanto": "Quanto",
    "aqlm": "AQLM",
    "vptq": "VPTQ",
    "higgs": "HIGGS",
    "spqr": "SpQR",
    "bitnet": "BitNet",
    "auto-round": "AutoRound",
}
#: Fields of a configuration that say how a checkpoint is quantised.
QUANTISATION_KEYS = ("quantization_config", "compression_config", "quantization")
_FLOATS = frozenset({"F32", "F16", "BF16", "F64"})
#: Endings of tensors that only quantised layers have.
_ENDINGS = (
    ".qweight", ".qzeros", ".scales", ".g_idx", ".SCB", ".absmax", ".quant_map", ".weight_packed",
    ".weight_scale", ".weight_scale_inv", ".weight_zero_point", ".W_q", "_blocks", "_qdata",
)  # fmt: skip
#: The command that writes some formats in bfloat16 (`halfmoon_engine.checkpoints.dequantise`).
COMMAND = "python -m halfmoon_engine.checkpoints.dequantise"
#: Methods that the command knows.
_DEQUANTISED = frozenset({"FP8", "FP8 (FBGEMM)", "MXFP4"})
_WAY_OUT = "serve the model that it was made from"


def check_configuration(folder: Path, config: Mapping[str, Any], names: frozenset[str]) -> None:
    """Refuse a checkpoint that is quantised by its configuration or by a file beside it.

    Raises:
        UnsupportedModel: naming the method and the field or file.
    """
    for prefix, part in nested_parts(config):
        for key in QUANTISATION_KEYS:
            # Null and an empty object stand for no quantisation.
            if part.get(key):
                raise _refusal(folder, _method(part[key]), f"{prefix}{key} in config.json")
    for name, method in QUANTISATION_FILES.items():
        if name in names:
            raise _refusal(folder, method, name)


def check_tensors(folder: Path, tensors: Mapping[str, TensorEntry]) -> None:
    """Refuse weights whose types or names only quantised layers have.

    Raises:
        UnsupportedModel: naming a tensor.
    """
    for name, entry in tensors.items():
        packed = entry.dtype.startswith(("F8", "F6", "F4"))
        method = "FP8" if entry.dtype.startswith("F8") else ""
        whole = entry.dtype not in _FLOATS and name.endswith((".weight", "_proj", "_projs"))
        if packed or whole or name.endswith(_ENDINGS):
            seen = f"tensor {name[:120]!r} of dtype {entry.dtype}"
            raise _refusal(folder, method, seen)


def is_quantised(
    config: Mapping[str, Any], names: frozenset[str], tensors: Mapping[str, TensorEntry]
) -> bool:
    """Return whether `check_configuration` or `check_tensors` would refuse a checkpoint."""
    try:
        check_configuration(Path(), config, names)
        check_tensors(Path(), tensors)
    except UnsupportedModel:
        return True
    return False


def _refusal(folder: Path, method: str, seen: str) -> UnsupportedModel:
    with_method = f" with {method}" if method else ""
    way_out = _WAY_OUT
    if method in _DEQUANTISED:
        way_out += f", or write it in bfloat16 ({COMMAND} FOLDER NEW_FOLDER) and serve that"
    return UnsupportedModel(
        f"{folder} is quantised{with_method} ({seen}), which is not served: {way_out}"
    )


def _method(found: Any) -> str:
    if not isinstance(found, dict):
        return ""
    name = found.get("quant_method")
    if not isinstance(name, str):
        loaded = found.get("load_in_4bit") or found.get("load_in_8bit")
        return "bitsandbytes" if loaded else ""
    known = _METHODS.get(name.lower().replace("_", "-"), _METHODS.get(name.lower()))
    return known or one_line(name, 40)
