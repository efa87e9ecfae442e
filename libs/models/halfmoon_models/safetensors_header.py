"""Read the header of a safetensors file: names, types, shapes and places of its tensors.

The format: eight bytes, little-endian, with the length of a JSON object; that object; then the
tensors' bytes, each at its offsets after the header, without holes or overlaps.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from halfmoon_models.bounded_files import MIB, open_regular, parse_json_object
from halfmoon_models.errors import BrokenCheckpoint

#: Most bytes of a header; a tensor takes about 150.
MAX_HEADER_BYTES = 64 * MIB
_MAX_DIMENSIONS = 16
#: Bits of one element.
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """Description of one tensor in a header."""

    dtype: str
    shape: tuple[int, ...]
    #: Offsets in bytes from the end of the header.
    begin: int
    end: int

    @property
    def n_elements(self) -> int:
        """Number of elements; 1 for a scalar, 0 where a dimension is 0."""
        return math.prod(self.shape)


def read_header(path: Path) -> Mapping[str, TensorEntry]:
    """Read and check a file's header, without its tensors.

    Raises:
        ModelNotFound: the file can't be read.
        BrokenCheckpoint: it is cut off, or its header is not what the format says.
    """
    with open_regular(path) as file:
        n_file = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        n_header = int.from_bytes(prefix, "little")
        if prefix == b"version " or prefix[:4] == b"<htt" or prefix[:4] == b"<!DO":
            raise BrokenCheckpoint(
                f"{path} is a text that stands for the file (a Git LFS pointer or a web page): "
                "fetch the file itself, with `git lfs pull` or `hf download`"
            )
        if len(prefix) < 8 or n_header > n_file - 8:
            raise BrokenCheckpoint(
                f"{path} has {n_file} bytes, its header says that it alone takes {n_header}: the "
                "file is cut off or not safetensors; fetch it once more"
            )
        if n_header > MAX_HEADER_BYTES:
            raise BrokenCheckpoint(
                f"{path} has a header of {n_header / MIB:.0f} MiB, allowed are "
                f"{MAX_HEADER_BYTES / MIB:.0f}: not a safetensors file; fetch it once more"
            )
        header = file.read(n_header)
    try:
        text = header.decode()
    except UnicodeDecodeError:
        raise BrokenCheckpoint(
            f"{path} has a header that is not text: not a safetensors file, or a damaged one; "
            "fetch it once more"
        ) from None
    content = parse_json_object(text, f"{path}: its header")
    tensors = {
        name: _entry(path, name, value) for name, value in content.items() if name != "__metadata__"
    }
    _check_places(path, tensors, n_file - 8 - n_header)
    return tensors


def _entry(path: Path, name: str, value: Any) -> TensorEntry:
    def broken(reason: str) -> BrokenCheckpoint:
        return BrokenCheckpoint(f"{path}: tensor {name[:120]!r} {reason}; fetch the file once more")

    if not isinstance(value, dict):
        raise broken("is not described by an object")
    dtype, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise broken(f"has the unknown dtype {str(dtype)[:40]!r}")
    if (
        not isinstance(shape, list)
        or len(shape) > _MAX_DIMENSIONS
        or not all(_is_size(size) for size in shape)
    ):
        raise broken(f"has the impossible shape {str(shape)[:80]}")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(_is_size(offset) for offset in offsets)
        or offsets[0] > offsets[1]
    ):
        raise broken(f"has the impossible offsets {str(offsets)[:80]}")
    entry = TensorEntry(dtype, tuple(shape), *offsets)
    n_bits = entry.n_elements * _BITS[dtype]
    if n_bits != 8 * (entry.end - entry.begin):
        raise broken(
            f"of shape {str(shape)[:80]} and dtype {dtype} takes {n_bits // 8} bytes, its offsets "
            f"span {entry.end - entry.begin}"
        )
    return entry


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


def _check_places(path: Path, tensors: Mapping[str, TensorEntry], n_data: int) -> None:
    ordered = sorted(tensors.values(), key=lambda entry: (entry.begin, entry.end))
    begins = [entry.begin for entry in ordered]
    ends = [entry.end for entry in ordered]
    wanted = ends[-1] if ends else 0
    if wanted > n_data:
        raise BrokenCheckpoint(
            f"{path} is cut off: its tensors take {wanted} bytes, {n_data} are there; fetch it "
            "once more"
        )
    holes = any(end != begin for end, (_, begin) in zip(ends, pairwise(begins), strict=False))
    if holes or (begins and begins[0] != 0) or wanted != n_data:
        raise BrokenCheckpoint(
            f"{path} has tensors that overlap, or bytes that belong to none; fetch it once more"
        )
