"""Compute a checkpoint's fingerprint: it differs when config or weights differ.

It names the model in `KvLayout.model` and in block hashes, so it covers what KV depends on
and nothing else. SHA-256, cut to 16 bytes, over

1. config.json as sorted JSON, without what doesn't change results: the dtype (the KV layout
   has the one that is used), names and versions of software;
2. of each weights file, by name: its size, its safetensors header (names, shapes, dtypes and
   places of all tensors), and contents: all of them up to 64 MiB, else 1 KiB from the start,
   the middle and the end of each tensor.

So a change of a few values inside of one large tensor can go unnoticed; a training step,
which changes them all, can't. Tokenizer, chat template and generation config aren't covered.
"""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

from halfmoon_models.errors import ModelNotFound
from halfmoon_models.weight_files import weight_paths

_DOMAIN = b"halfmoon.model.v1"
FINGERPRINT_BYTES = 16
#: Files up to this size are hashed as a whole.
WHOLE_BYTES = 64 * 1024 * 1024
SAMPLE_BYTES = 1024
_MAX_HEADER_BYTES = 100 * 1024 * 1024
_NEUTRAL_KEYS = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache")


def fingerprint(folder: Path) -> str:
    """Return the fingerprint of the checkpoint in `folder`, 32 hexadecimal digits.

    Raises:
        ModelNotFound: config.json or a weights file is missing or can't be read.
    """
    digest = hashlib.sha256(_DOMAIN)
    _add(digest, _canonical_config(folder))
    for path in weight_paths(folder):
        _add(digest, path.name.encode())
        with path.open("rb") as file:
            _add_weights(digest, file, path)
    return digest.hexdigest()[: 2 * FINGERPRINT_BYTES]


def _canonical_config(folder: Path) -> bytes:
    config = _read_json(folder / "config.json")
    return json.dumps(_without_neutral(config), sort_keys=True, separators=(",", ":")).encode()


def _without_neutral(part: Any) -> Any:
    """Drop the neutral keys of a config and of its nested configs."""
    if isinstance(part, dict):
        return {k: _without_neutral(v) for k, v in part.items() if k not in _NEUTRAL_KEYS}
    return part


def _add_weights(digest: "hashlib._Hash", file: BinaryIO, path: Path) -> None:
    size = path.stat().st_size
    digest.update(struct.pack("<Q", size))
    if size <= WHOLE_BYTES:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return
    header_bytes = int.from_bytes(file.read(8), "little")
    if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, size):
        raise ModelNotFound(f"{path} is not a safetensors file")
    header = file.read(header_bytes)
    _add(digest, header)
    tensors = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
    for name in sorted(tensors, key=lambda name: tensors[name]["data_offsets"]):
        begin, end = tensors[name]["data_offsets"]
        last = max(begin, end - SAMPLE_BYTES)
        for offset in (begin, (begin + last) // 2, last):
            file.seek(8 + header_bytes + offset)
            digest.update(file.read(min(SAMPLE_BYTES, end - begin)))


def _add(digest: "hashlib._Hash", part: bytes) -> None:
    """Hash a part after its length, so that different sequences of parts never look the same."""
    digest.update(struct.pack("<Q", len(part)))
    digest.update(part)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{path} can't be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelNotFound(f"{path} does not hold a JSON object")
    return value
