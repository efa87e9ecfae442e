"""Write a checkpoint in FP8 or MXFP4 once more in bfloat16, in which it can be served.

    python -m halfmoon_engine.checkpoints.dequantise FOLDER NEW_FOLDER

Works file by file on the tensors, without the model's class: memory is needed for one file in
bfloat16. A tensor in FP8 is multiplied by its scales, which its neighbour `…_scale_inv` or
`…_scale` holds for the tensor, its rows or its blocks. A pair `…_blocks` and `…_scales` is MXFP4.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open as _safe_open
from safetensors.torch import save_file as _save_file

from halfmoon_models.bounded_files import MIB, list_files, read_json_object
from halfmoon_models.errors import BrokenCheckpoint, ModelError, UnsupportedModel
from halfmoon_models.folder_inspection import CONFIG_FILE
from halfmoon_models.quantisation import (
    COMMAND,
    QUANTISATION_FILES,
    QUANTISATION_KEYS,
    check_tensors,
)
from halfmoon_models.safetensors_header import read_header
from halfmoon_models.weight_files import INDEX_FILE, read_weights

safe_open: Any = _safe_open
save_file: Any = _save_file

#: Endings of the names of tensors with scales, and of those that only a quantised forward reads.
_SCALES = ("_scale_inv", "_scale")
_UNREAD = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")
_BLOCKS, _BLOCK_SCALES = "_blocks", "_scales"
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Values of four bits: a sign, two bits of exponent, one of mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_FP4_BIAS = 127
#: Endings of the small files that a model's folder has beside its weights.
_COPIED = (".json", ".jinja", ".model", ".txt")


class _Tensors:
    """The tensors of all files of a checkpoint, read one by one."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor


def dequantise(folder: Path, target: Path) -> None:
    """Write the checkpoint in `folder` into a new folder, in bfloat16.

    Raises:
        BrokenCheckpoint: scales do not fit to their tensor.
        UnsupportedModel: the target is there, or tensors are in another format.
    """
    if target.exists():
        raise UnsupportedModel(f"{target} is there already: name a new folder")
    config = read_json_object(folder / CONFIG_FILE, 4 * MIB)
    weights = read_weights(folder)
    target.mkdir(parents=True)
    try:
        _write(folder, target, config, weights.files)
    except BaseException:
        shutil.rmtree(target)
        raise


def _write(folder: Path, target: Path, config: Mapping[str, Any], paths: Sequence[Path]) -> None:
    place: dict[str, str] = {}
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in paths]
        tensors = _Tensors(files)
        for path, file in zip(paths, files, strict=True):
            names = sorted(file.keys())
            whole = {
                name: tensor
                for stored in names
                for name, tensor in _dequantised(stored, tensors, config)
            }
            if whole:
                save_file(whole, target / path.name, metadata={"format": "pt"})
                check_tensors(folder, read_header(target / path.name))
                place.update(dict.fromkeys(whole, path.name))
    _copy_small_files(folder, target, config)
    if (folder / INDEX_FILE).is_file():
        index = {"metadata": {}, "weight_map": place}
        (target / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True))


def _dequantised(
    name: str, tensors: _Tensors, config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a stored tensor under its name in the new file; nothing for scales."""
    if name.endswith(_UNREAD) or _belongs_to_another(name, tensors):
        return
    tensor = tensors[name]
    if name.endswith(_BLOCKS):
        base = name.removesuffix(_BLOCKS)
        if base + _BLOCK_SCALES in tensors:
            yield base, _from_mxfp4(name, tensor, tensors[base + _BLOCK_SCALES])
            return
    if tensor.dtype not in _FP8:
        half = tensor.is_floating_point() and tensor.element_size() > 2
        yield name, tensor.bfloat16() if half else tensor
        return
    scales = next((name + ending for ending in _SCALES if name + ending in tensors), None)
    if scales is None:
        raise BrokenCheckpoint(
            f"tensor {name[:120]!r} is in FP8 without scales ({name[:80]}_scale_inv); fetch the "
            "model once more"
        )
    yield name, _from_fp8(name, tensor, tensors[scales], _block_size(config))


def _belongs_to_another(name: str, tensors: _Tensors) -> bool:
    """Return whether a tensor holds the scales of another one."""
    if name.endswith(_BLOCK_SCALES):
        return name.removesuffix(_BLOCK_SCALES) + _BLOCKS in tensors
    ending = next((ending for ending in _SCALES if name.endswith(ending)), None)
    return ending is not None and name.removesuffix(ending) in tensors


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    found = [config.get(key) for key in QUANTISATION_KEYS]
    sizes = next((part.get("weight_block_size") for part in found if isinstance(part, dict)), None)
    if isinstance(sizes, list) and len(sizes) == 2 and all(type(n) is int for n in sizes):
        rows, columns = sizes
        return (rows, columns) if rows > 0 and columns > 0 else None
    return None


def _from_fp8(
    name: str, tensor: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None
) -> torch.Tensor:
    """Multiply a tensor in FP8 by its scales: one, one a row, or one a block."""
    scales = scales.float()
    if scales.dim() == 1 and scales.numel() > 1:
        scales = scales[:, None]
    if scales.numel() == 1:
        return (tensor.float() * scales.reshape(())).bfloat16()
    misfit = BrokenCheckpoint(
        f"tensor {name[:120]!r} of shape {list(tensor.shape)} has scales of shape "
        f"{list(scales.shape)}, which do not cover it in blocks of {block or 'equal sizes'}; fetch "
        "the model once more"
    )
    if tensor.dim() < 2 or scales.dim() != tensor.dim() or scales.shape[:-2] != tensor.shape[:-2]:
        raise misfit
    for i in (-2, -1):
        n, n_scales = tensor.shape[i], scales.shape[i]
        size = block[i] if block is not None and n_scales > 1 else -(-n // n_scales)
        if -(-n // size) != n_scales:
            raise misfit
        scales = scales.repeat_interleave(size, dim=i).narrow(i, 0, n)
    return (tensor.float() * scales).bfloat16()


def _from_mxfp4(name: str, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return experts' weights of gpt-oss, [experts, in, out].

    Args:
        name: of the blocks.
        blocks: [experts, out, groups, 16], two numbers a byte, the lower four bits first.
        scales: [experts, out, groups], exponents of two.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.dim() != 4:
        raise UnsupportedModel(f"tensor {name[:120]!r} is not in MXFP4 as gpt-oss has it")
    if blocks.shape[:-1] != scales.shape:
        raise BrokenCheckpoint(
            f"tensor {name[:120]!r} of shape {list(blocks.shape)} has scales of shape "
            f"{list(scales.shape)}; fetch the model once more"
        )
    values = torch.tensor(_FP4, dtype=torch.bfloat16)
    exponents = (scales.int() - _FP4_BIAS)[..., None]
    pairs = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1)
    rows = torch.ldexp(pairs.flatten(-2), exponents).flatten(-2)
    return rows.transpose(1, 2).bfloat16().contiguous()


def _copy_small_files(folder: Path, target: Path, config: Mapping[str, Any]) -> None:
    for name in sorted(list_files(folder)):
        kept = name.endswith(_COPIED) and name not in (CONFIG_FILE, INDEX_FILE)
        if kept and name not in QUANTISATION_FILES:
            shutil.copyfile(folder / name, target / name)
    plain = {**_without_quantisation(config), "dtype": "bfloat16"}
    plain.pop("torch_dtype", None)
    (target / CONFIG_FILE).write_text(json.dumps(plain, indent=2, sort_keys=True))


def _without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_quantisation(part) if isinstance(part, dict) else part
        for key, part in config.items()
        if key not in QUANTISATION_KEYS
    }


def main() -> int:
    """Read both folders from the command line; return the exit status."""
    if len(sys.argv) != 3:
        print(f"{COMMAND} FOLDER NEW_FOLDER", file=sys.stderr)
        return 2
    folder, target = map(Path, sys.argv[1:])
    try:
        dequantise(folder, target)
    except (ModelError, OSError) as error:
        print(f"halfmoon: {error}", file=sys.stderr)
        return 2
    print(f"{target} holds {folder} in bfloat16")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
