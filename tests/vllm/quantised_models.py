"""Tiny checkpoints with quantised weights, written by hand in the formats that vLLM reads.

int4 formats hold 8 numbers in 32 bits. GPTQ and compressed-tensors pack neighbours of a column or
row, AWQ packs columns in an order of its own.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from halfmoon_testing.models.tiny_models import make_tiny_model

GROUP = 32
_SHAPE = {"head_dim": 32, "hidden_size": 128, "intermediate_size": 256}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]


def make_quantised_models(root: Path) -> Mapping[str, Path]:
    """Write one model in all formats; return their folders by format."""
    base = make_tiny_model("llama", root / "base", 1, _SHAPE)
    formats: dict[str, tuple[dict[str, Any], Callable[[str, torch.Tensor], Tensors]]] = {
        "gptq": (
            {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
            | {"sym": True, "lm_head": False},
            _gptq,
        ),
        "awq": (
            {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
            | {"version": "gemm"},
            _awq,
        ),
        "compressed-int4": (
            _compressed("pack-quantized", 4, "int", "group", activations=None),
            _packed,
        ),
        "compressed-int8": (_compressed("int-quantized", 8, "int", "channel", "token"), _int8),
        "compressed-fp8": (_compressed("float-quantized", 8, "float", "channel", "token"), _fp8),
        "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, _fp8_tensor),
    }
    return {name: _write(base, root / name, *how) for name, how in formats.items()}


def _write(
    base: Path,
    folder: Path,
    quantisation: Mapping[str, Any],
    convert: Callable[[str, torch.Tensor], Tensors],
) -> Path:
    folder.mkdir()
    for path in (*base.glob("*.json"), *base.glob("*.jinja")):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((base / "config.json").read_text())
    config |= {"quantization_config": quantisation, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors: Tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= convert(name.removesuffix(".weight"), weight)
        else:
            tensors[name] = weight.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _compressed(
    form: str, bits: int, kind: str, strategy: str, activations: str | None
) -> dict[str, Any]:
    number = {"num_bits": bits, "type": kind, "symmetric": True}
    weights = {**number, "strategy": strategy, "dynamic": False}
    if strategy == "group":
        weights["group_size"] = GROUP
    inputs = activations and {**number, "strategy": activations, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _int8(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 127
    whole = (weight / scale).round().to(torch.int8)
    return {f"{name}.weight": whole, f"{name}.weight_scale": scale}


def _fp8(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {
        f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn),
        f"{name}.weight_scale": scale,
    }


def _fp8_tensor(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax() / 448
    return {
        f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn),
        f"{name}.weight_scale": scale,
    }


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers from 0 to 15, of which 8 stands for zero, and the scales of groups."""
    n_out, n_in = weight.shape
    groups = weight.reshape(n_out, n_in // GROUP, GROUP)
    scales = (groups.abs().amax(2) / 7).clamp(min=1e-6)
    whole = (groups / scales[..., None]).round().clamp(-8, 7) + 8
    return whole.reshape(n_out, n_in).to(torch.int64), scales


def _pack(numbers: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Pack each 8 numbers of the last dimension, the first one of `order` in the lowest bits."""
    by_8 = numbers.reshape(*numbers.shape[:-1], -1, 8)
    words = sum(by_8[..., place] << (4 * i) for i, place in enumerate(order))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _gptq(name: str, weight: torch.Tensor) -> Tensors:
    numbers, scales = _int4(weight)
    n_out, n_in = weight.shape
    return {
        f"{name}.qweight": _pack(numbers).T.contiguous(),
        f"{name}.scales": scales.T.contiguous().to(torch.bfloat16),
        # This format adds 1 to its zeros.
        f"{name}.qzeros": _pack(torch.full((n_in // GROUP, n_out), 7)),
        f"{name}.g_idx": (torch.arange(n_in) // GROUP).to(torch.int32),
    }


def _awq(name: str, weight: torch.Tensor) -> Tensors:
    numbers, scales = _int4(weight)
    n_out, n_in = weight.shape
    return {
        f"{name}.qweight": _pack(numbers.T.contiguous(), _AWQ_ORDER),
        f"{name}.scales": scales.T.contiguous().to(torch.bfloat16),
        f"{name}.qzeros": _pack(torch.full((n_in // GROUP, n_out), 8), _AWQ_ORDER),
    }


def _packed(name: str, weight: torch.Tensor) -> Tensors:
    numbers, scales = _int4(weight)
    return {
        f"{name}.weight_packed": _pack(numbers),
        f"{name}.weight_scale": scales.to(torch.bfloat16),
        f"{name}.weight_shape": torch.tensor(weight.shape),
    }
