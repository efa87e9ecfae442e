"""Find the files of a model's weights, and check that they fit together."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon_models.bounded_files import MIB, read_json_object
from halfmoon_models.errors import BrokenCheckpoint, ModelNotFound
from halfmoon_models.safetensors_header import TensorEntry, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 32 * MIB
_MAX_SHARDS = 10_000


@dataclass(frozen=True)
class WeightIndex:
    """A checkpoint's tensors by name, from the headers of all its files."""

    files: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry]

    @property
    def n_elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(entry.n_elements for entry in self.tensors.values())

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors, as they were saved."""
        return sum(entry.end - entry.begin for entry in self.tensors.values())


def weight_paths(folder: Path) -> list[Path]:
    """Return the safetensors files that a model in `folder` is loaded from, sorted.

    Raises:
        ModelNotFound: there is none, or the index names one that isn't there.
        BrokenCheckpoint: the index is not one, or names files outside of the folder.
    """
    return _files(folder, _read_index(folder))


def read_weights(folder: Path) -> WeightIndex:
    """Read the headers of all weights files, and compare them with each other and the index.

    Raises:
        ModelNotFound: a file is missing.
        BrokenCheckpoint: one is damaged, or they contradict each other.
    """
    index = _read_index(folder)
    files = _files(folder, index)
    tensors: dict[str, TensorEntry] = {}
    place: dict[str, str] = {}
    for path in files:
        header = read_header(path)
        if twice := next((name for name in header if name in tensors), None):
            raise BrokenCheckpoint(
                f"tensor {twice[:120]!r} is in {place[twice]} and in {path.name} of {folder}; "
                "fetch the model once more"
            )
        tensors.update(header)
        place.update(dict.fromkeys(header, path.name))
    if index is not None:
        _compare(folder, index, place)
    if not tensors:
        raise BrokenCheckpoint(f"{folder} has weights files without a tensor; fetch it once more")
    empty = next((name for name, entry in tensors.items() if entry.n_elements == 0), None)
    if empty is not None:
        raise BrokenCheckpoint(
            f"tensor {empty[:120]!r} of {folder} has no elements (shape "
            f"{list(tensors[empty].shape)}); save the model once more with its weights gathered"
        )
    return WeightIndex(tuple(files), tensors)


def read_index_file(folder: Path) -> Mapping[str, Any] | None:
    """Return the content of a folder's index; None without one.

    Raises:
        BrokenCheckpoint: it holds no JSON object.
    """
    path = folder / INDEX_FILE
    return read_json_object(path, _MAX_INDEX_BYTES) if path.is_file() else None


def _read_index(folder: Path) -> Mapping[str, str] | None:
    """Return the file of each tensor; None without an index."""
    path = folder / INDEX_FILE
    content = read_index_file(folder)
    if content is None:
        return None
    weight_map: Any = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BrokenCheckpoint(f"{path} has no weight_map with tensors; fetch it once more")
    for name in weight_map.values():
        # A plain name: transformers joins it to the folder's path as it stands.
        if not isinstance(name, str) or not name or "/" in name or "\0" in name or name == "..":
            raise BrokenCheckpoint(
                f"{path} names {str(name)[:120]!r} as a file; a shard is a file of the same folder"
            )
        if not name.endswith(".safetensors"):
            raise BrokenCheckpoint(
                f"{path} names {name[:120]!r}; weights are read from safetensors files only"
            )
    return weight_map


def _files(folder: Path, index: Mapping[str, str] | None) -> list[Path]:
    names = [SINGLE_FILE] if index is None else sorted(set(index.values()))
    if len(names) > _MAX_SHARDS:
        raise BrokenCheckpoint(
            f"{folder / INDEX_FILE} names {len(names)} files, allowed {_MAX_SHARDS}"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelNotFound(
            f"{folder} lacks {', '.join(missing[:3])}{more}; weights are read from safetensors "
            "files only: fetch the model once more, all of its files"
        )
    if index is not None and SINGLE_FILE not in names and (folder / SINGLE_FILE).is_file():
        raise BrokenCheckpoint(
            f"{folder} has {SINGLE_FILE} and {INDEX_FILE}, which names other files: "
            "remove those that are "
            "not meant"
        )
    return [folder / name for name in names]


def _compare(folder: Path, index: Mapping[str, str], place: Mapping[str, str]) -> None:
    for name, file in index.items():
        if place.get(name) != file:
            raise BrokenCheckpoint(
                f"{folder / INDEX_FILE} says that tensor {name[:120]!r} is in {file}, "
                "which lacks it; "
                "fetch the model once more"
            )
    if extra := next((name for name in place if name not in index), None):
        raise BrokenCheckpoint(
            f"tensor {extra[:120]!r} in {place[extra]} of {folder} is not in its index; fetch the "
            "model once more"
        )
