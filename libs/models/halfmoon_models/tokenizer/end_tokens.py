"""Find the tokens that end an answer, in all places where a model's folder names them.

Fine-tunes often name one end in ``generation_config.json`` and another one in their tokenizer or
their chat template. An answer ends at each of them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from halfmoon_models.bounded_files import list_files, read_json_object
from halfmoon_models.text_file_checks import MAX_SMALL_BYTES, vocabulary_size
from halfmoon_models.tokenizer.tokenizer_builder import BuiltTokenizer
from halfmoon_models.tokenizer.turn_end import Render, find_turn_end

#: Files that name ends, beside the tokenizer.
END_CONFIGS = ("generation_config.json", "config.json", "special_tokens_map.json")


def find_end_tokens(
    folder: Path, built: BuiltTokenizer, render: Render | None
) -> Mapping[int, str]:
    """Return the ids of all ends, each with the place that names it first.

    Args:
        folder: of the model.
        built: its tokenizer.
        render: writes messages by its chat template, as `find_turn_end` has it; None: none.

    Raises:
        ModelError: a file is damaged.
    """
    names = list_files(folder)
    configs = {
        name: read_json_object(folder / name, MAX_SMALL_BYTES) if name in names else {}
        for name in END_CONFIGS
    }
    n_embedded = vocabulary_size(configs["config.json"])
    ends: dict[int, str] = {}
    for token, place in (*_config_ends(configs), *_tokenizer_ends(configs, built, render)):
        # A token without an embedding is never drawn.
        if type(token) is int and token >= 0 and (n_embedded is None or token < n_embedded):
            ends.setdefault(token, place)
    return ends


def _config_ends(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Any, str]]:
    for place in ("generation_config.json", "config.json"):
        parts = [configs[place]]
        if place == "config.json":
            parts.append(parts[0].get("text_config") or {})
        for part in parts:
            found = part.get("eos_token_id")
            for token in found if isinstance(found, list) else [found]:
                yield token, place


def _tokenizer_ends(
    configs: Mapping[str, Mapping[str, Any]], built: BuiltTokenizer, render: Render | None
) -> Iterator[tuple[Any, str]]:
    special_map = configs["special_tokens_map.json"].get("eos_token")
    texts = {
        "the tokenizer's eos_token": built.special_tokens.get("eos_token"),
        "special_tokens_map.json": (
            special_map.get("content") if isinstance(special_map, dict) else special_map
        ),
    }
    if render is not None:
        added = [token.content for token in built.fast.get_added_tokens_decoder().values()]
        texts["the chat template"] = find_turn_end(render, added)
    for place, text in texts.items():
        if isinstance(text, str):
            yield built.fast.token_to_id(text), place
