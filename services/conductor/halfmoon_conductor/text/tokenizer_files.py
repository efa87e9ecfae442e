"""Read the files of a model that its tokenizer is made of."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import huggingface_hub

from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable
from halfmoon_models.bounded_files import list_files, read_json_object
from halfmoon_models.errors import ModelError, ModelNotFound, one_line
from halfmoon_models.foreign_formats import check_file_names
from halfmoon_models.text_file_checks import MAX_SMALL_BYTES, check_text_files

#: Files of a model that the conductor reads; its weights are read by the workers.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "config.json",
)


def fetch_tokenizer_files(spec: str) -> Path:
    """Fetch the tokenizer's files of a hub id and return their folder.

    Raises:
        TokenizerUnavailable: the hub does not give them.
    """
    try:
        return Path(huggingface_hub.snapshot_download(spec, allow_patterns=list(TOKENIZER_FILES)))
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
    """Read and check the JSON files beside tokenizer.json; a missing one is an empty object.

    Raises:
        ModelError: a file is damaged, or there is no tokenizer.
    """
    names = list_files(folder)
    if "tokenizer.json" not in names and "config.json" not in names:
        with suppress(ModelNotFound):  # raises what the folder has instead, if known
            check_file_names(folder, names)
    configs = {
        name: read_json_object(folder / name, MAX_SMALL_BYTES) if name in names else {}
        for name in TOKENIZER_FILES
        if name.endswith(".json") and name not in ("tokenizer.json", "chat_template.json")
    }
    check_text_files(folder, configs["config.json"], names, needs_tokenizer=True)
    return configs


def special_tokens_of(configs: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Return special tokens by name, such as ``bos_token``, as transformers finds them.

    Files have a token as text or as an object. The config lists the names of further ones. Where
    it describes its added tokens too, it is complete, and special_tokens_map.json is not read.
    """
    config = configs["tokenizer_config.json"]
    sources = [config, _members(config, "model_specific_special_tokens")]
    sources.append(_members(config, "extra_special_tokens"))
    if "added_tokens_decoder" not in config:
        old = configs["special_tokens_map.json"]
        sources += [old, _members(old, "extra_special_tokens")]
    tokens: dict[str, str] = {}
    for source in sources:
        for name, token in source.items():
            content = token.get("content") if isinstance(token, dict) else token
            is_named = source is not config and source is not configs["special_tokens_map.json"]
            if (is_named or name.endswith("_token")) and isinstance(content, str):
                tokens[name] = content
    return tokens


def _members(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    members = config.get(name)
    return members if isinstance(members, dict) else {}
