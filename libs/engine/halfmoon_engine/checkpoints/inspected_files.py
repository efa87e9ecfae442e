"""Give transformers folders that hold what was inspected, and nothing else of a model's folder.

In a folder transformers looks for a dozen files that no check has read: adapters, code, weights of
other forms, further tokenizers. Its settings name more of them. So it gets temporary folders of
copies, and of links to the weights.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfmoon_models.bounded_files import list_files, read_bytes, read_json_object
from halfmoon_models.folder_inspection import CONFIG_FILE, InspectedModel
from halfmoon_models.text_file_checks import MAX_SMALL_BYTES, MAX_TOKENIZER_BYTES, OTHER_TOKENIZERS
from halfmoon_models.tokenizer.template_files import read_template_files
from halfmoon_models.tokenizer.tokenizer_builder import TOKENIZER_FILES
from halfmoon_models.weight_files import INDEX_FILE, read_index_file

_GENERATION = "generation_config.json"
_SETTINGS = "tokenizer_config.json"
#: Settings of a tokenizer that transformers takes for paths, beside those that end in ``_file``.
_PATHS = frozenset({"init_inputs", "vocab", "merges", "tokenizer_object"})


@contextmanager
def folder_of_weights(inspected: InspectedModel) -> Iterator[Path]:
    """Yield a folder of a model's weights and configurations.

    The index has its `metadata`: it says nothing that is needed, some tools leave it out, and
    transformers fails without it.

    Raises:
        ModelError: a file can't be read.
    """
    source = inspected.folder
    with tempfile.TemporaryDirectory(prefix="halfmoon-model-") as name:
        made = Path(name)
        for file in inspected.weights.files:
            (made / file.name).symlink_to(file.resolve())
        if (index := read_index_file(source)) is not None:
            metadata = index.get("metadata")
            kept = {**index, "metadata": metadata if isinstance(metadata, dict) else {}}
            _write(made / INDEX_FILE, kept)
        _write(made / CONFIG_FILE, inspected.config)
        if _GENERATION in list_files(source):
            _write(made / _GENERATION, read_json_object(source / _GENERATION, MAX_SMALL_BYTES))
        yield made


@contextmanager
def folder_of_tokenizer(source: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a folder of a tokenizer's files, without the settings that lead to further files.

    Args:
        source: the model's folder.
        config: its configuration, as it was inspected.

    Raises:
        ModelError: a file can't be read, or is a link that leaves the folder.
    """
    names = list_files(source)
    settings = read_json_object(source / _SETTINGS, MAX_SMALL_BYTES) if _SETTINGS in names else {}
    # Of several releases' tokenizers transformers takes that of its own.
    named = settings.pop("fast_tokenizer_files", None)
    versions = sorted(names.intersection(map(str, named if isinstance(named, list) else ())))
    with tempfile.TemporaryDirectory(prefix="halfmoon-tokenizer-") as name:
        made = Path(name)
        copied = {*TOKENIZER_FILES, *OTHER_TOKENIZERS, *versions} - {_SETTINGS, CONFIG_FILE}
        for file in names & copied:
            (made / file).write_bytes(read_bytes(source / file, MAX_TOKENIZER_BYTES))
        for path, text in read_template_files(source).items():
            (made / path).parent.mkdir(exist_ok=True)
            (made / path).write_text(text, encoding="utf-8", newline="")
        if _SETTINGS in names:
            listed = {"fast_tokenizer_files": versions} if versions else {}
            _write(made / _SETTINGS, {**_without_paths(settings), **listed})
        _write(made / CONFIG_FILE, config)
        yield made


def _without_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in settings.items()
        if key not in _PATHS and not key.endswith("_file")
    }


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(content)), encoding="utf-8")
