"""Read the files of a model that its tokenizer is made of."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import huggingface_hub

from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable
from halfmoon_models.bounded_files import list_files, read_json_object
from halfmoon_models.errors import ModelError, ModelNotFound, one_line
from halfmoon_models.foreign_formats import check_file_names
from halfmoon_models.text_file_checks import MAX_SMALL_BYTES, check_text_files
from halfmoon_models.tokenizer.tokenizer_builder import TOKENIZER_FILES

#: Files of a model that the conductor reads; its weights are read by the workers.
MODEL_FILES = (
    *TOKENIZER_FILES,
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
)
_CONFIGS = ("config.json", "tokenizer_config.json")


def fetch_tokenizer_files(spec: str) -> Path:
    """Fetch the tokenizer's files of a hub id and return their folder.

    Raises:
        TokenizerUnavailable: the hub does not give them.
    """
    try:
        return Path(huggingface_hub.snapshot_download(spec, allow_patterns=list(MODEL_FILES)))
    except Exception as error:  # many kinds: unknown id, no access, no network, a bad name
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TokenizerUnavailable(
            f"{spec} is not a local folder, and could not be fetched from the hub: "
            f"{one_line(first_line, 300)}"
        ) from None


@contextmanager
def naming_model(spec: str) -> Iterator[None]:
    """Turn errors of malformed config files into one that names the model."""
    try:
        yield
    except ModelError as error:
        raise TokenizerUnavailable(str(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise TokenizerUnavailable(
            f"a config file of {spec} is unusable: {one_line(error, 300)}"
        ) from None


def read_configs(folder: Path) -> dict[str, dict[str, Any]]:
    """Check a folder, and return its configurations; a missing one is an empty object.

    Raises:
        ModelError: a file is damaged, or there is no tokenizer.
    """
    names = list_files(folder)
    if "config.json" not in names and names.isdisjoint(TOKENIZER_FILES):
        with suppress(ModelNotFound):  # raises what the folder has instead, if known
            check_file_names(folder, names)
    configs = {
        name: read_json_object(folder / name, MAX_SMALL_BYTES) if name in names else {}
        for name in _CONFIGS
    }
    check_text_files(folder, configs["config.json"], names, needs_tokenizer=True)
    return configs
