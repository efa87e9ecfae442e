"""Check a model's generation_config.json and the files of its tokenizer."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from halfmoon_models.bounded_files import MIB, read_json_object, read_text
from halfmoon_models.config_parts import text_parts
from halfmoon_models.errors import BrokenCheckpoint, ModelNotFound, one_line

_GENERATION = "generation_config.json"
_TOKENIZER = "tokenizer.json"
_TEKKEN = "tekken.json"
_VOCABULARY = frozenset({"vocab.json", "merges.txt"})
#: Tokenizers of other forms, the most telling first.
OTHER_TOKENIZERS = (
    "tokenizer.model", "tiktoken.model", "tokenizer.model.v3", "qwen.tiktoken", "spiece.model",
    "sentencepiece.bpe.model", "vocab.json", "vocab.txt",
)  # fmt: skip
MAX_SMALL_BYTES = 16 * MIB
#: Most bytes of a tokenizer; the largest vocabularies take about 40 MiB.
MAX_TOKENIZER_BYTES = 64 * MIB
_MAX_EOS = 1000
#: Sixty times the largest vocabularies. Tables have an entry for each id up to the largest.
MAX_TOKEN_IDS = 1 << 24


def check_text_files(
    folder: Path, config: Mapping[str, Any], names: frozenset[str], *, needs_tokenizer: bool
) -> None:
    """Refuse end tokens outside of the vocabulary, and tokenizer files that can't be read.

    Raises:
        ModelNotFound: no tokenizer.json, where one is needed.
        BrokenCheckpoint: naming the file and what is wrong with it.
    """
    n_vocab = vocabulary_size(config)
    generation = (
        read_json_object(folder / _GENERATION, MAX_SMALL_BYTES) if _GENERATION in names else {}
    )
    places: list[tuple[str, Any]] = [(_GENERATION, generation)]
    if generation.get("eos_token_id") is None:  # else what the configuration has is not needed
        places = [("config.json", config), ("config.json: text_config", config.get("text_config"))]
    for place, content in places:
        if isinstance(content, dict):
            check_eos(place, content.get("eos_token_id"), n_vocab)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if name in names:
            read_json_object(folder / name, MAX_SMALL_BYTES)
    if "chat_template.jinja" in names:
        read_text(folder / "chat_template.jinja", MAX_SMALL_BYTES)
    if _TOKENIZER in names:
        tokenizer = read_json_object(folder / _TOKENIZER, MAX_TOKENIZER_BYTES)
        check_tokenizer(folder / _TOKENIZER, tokenizer)
        _check_file_fits(folder, tokenizer, n_vocab)
    elif needs_tokenizer and not has_tokenizer(names):
        raise without_tokenizer(folder, names)


def has_tokenizer(names: frozenset[str]) -> bool:
    """Return whether a folder with these files has some that a tokenizer is built of."""
    return _TOKENIZER in names or _TEKKEN in names or names >= _VOCABULARY


def without_tokenizer(folder: Path, names: frozenset[str]) -> ModelNotFound:
    """Return the error of a folder without a tokenizer that can be read, with the way out."""
    found = next((name for name in OTHER_TOKENIZERS if name in names), "")
    problem = f"; its {found} is of a kind that is not read here" if found else ""
    return ModelNotFound(
        f"{folder} has no {_TOKENIZER}{problem}: where transformers reads the folder, write one "
        "with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def check_tokenizer(path: Path, tokenizer: Mapping[str, Any]) -> None:
    """Refuse a tokenizer without a model, or with ids beyond the bound of tables.

    Raises:
        BrokenCheckpoint: naming the file and the token.
    """
    model = tokenizer.get("model")
    if not isinstance(model, dict):
        raise BrokenCheckpoint(
            f"{path} has no model in it: not a tokenizer, or a damaged one; fetch it once more"
        )
    _check_merges(path, model)
    # Elsewhere the vocabulary is a list, and ids are its places.
    vocab = model.get("vocab")
    ids = list(vocab.items()) if isinstance(vocab, dict) else []
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            ids.append((token.get("content"), token.get("id")))
    for content, token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < MAX_TOKEN_IDS:
            raise BrokenCheckpoint(
                f"{path}: token {one_line(content, 60)!r} has the id {one_line(token_id, 40)}, a "
                f"whole number below {MAX_TOKEN_IDS} is wanted; fetch the file once more"
            )


def check_embedded(
    folder: Path, vocab: Mapping[str, int], added: Collection[str], n_embedded: int | None
) -> None:
    """Refuse a tokenizer whose ordinary tokens the model has no embedding for.

    Any text may have such a token. Added tokens are rare, and are refused where they occur.

    Args:
        folder: of the model.
        vocab: ids of the tokens by their texts.
        added: texts of the added tokens.
        n_embedded: number of tokens that the model embeds; None: not known.

    Raises:
        BrokenCheckpoint: naming both numbers.
    """
    largest = max((token for text, token in vocab.items() if text not in added), default=-1)
    if n_embedded is not None and largest >= n_embedded:
        raise BrokenCheckpoint(
            f"{folder}: its tokenizer has ids up to {largest} for ordinary text, while the model "
            f"embeds {n_embedded} tokens (vocab_size in config.json): they do not belong together; "
            "fetch both from one source, or resize the model with transformers' "
            "resize_token_embeddings"
        )


def _check_file_fits(folder: Path, tokenizer: Mapping[str, Any], n_embedded: int | None) -> None:
    vocab, listed = tokenizer["model"].get("vocab"), tokenizer.get("added_tokens")
    if isinstance(vocab, list):
        texts = (each[0] if isinstance(each, list) and each else each for each in vocab)
        vocab = {str(text): place for place, text in enumerate(texts)}
    added = {str(each.get("content")) for each in listed or () if isinstance(each, dict)}
    check_embedded(folder, vocab if isinstance(vocab, dict) else {}, added, n_embedded)


def _check_merges(path: Path, model: Mapping[str, Any]) -> None:
    """Refuse merges that lack the common prefix: the library panics at them."""
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not (isinstance(prefix, str) and prefix and isinstance(merges, list)):
        return
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        right = pair[1] if isinstance(pair, list) and len(pair) == 2 else None
        if not isinstance(right, str) or not right.startswith(prefix):
            raise BrokenCheckpoint(
                f"{path}: merge {one_line(merge, 60)!r} lacks the continuing_subword_prefix "
                f"{one_line(prefix, 60)!r}; fetch the file once more"
            )


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a model embeds; None where its configuration does not say."""
    for _, part in reversed(text_parts(config)):
        if type(part.get("vocab_size")) is int:
            return int(part["vocab_size"])
    return None


def check_eos(place: str, found: Any, n_vocab: int | None) -> None:
    """Refuse end tokens outside of the vocabulary; None stands for no end token.

    Raises:
        BrokenCheckpoint: naming the place and the token.
    """
    if found is None:
        return
    ids = found if isinstance(found, list) else [found]
    if len(ids) > _MAX_EOS:
        raise BrokenCheckpoint(
            f"{place}: eos_token_id lists {len(ids)} tokens, at most {_MAX_EOS} are allowed"
        )
    for token in ids:
        if type(token) is not int or token < 0 or (n_vocab is not None and token >= n_vocab):
            of = "whole numbers from 0" if n_vocab is None else f"0 to {n_vocab - 1}"
            raise BrokenCheckpoint(
                f"{place}: eos_token_id {one_line(token, 60)} is not in the vocabulary ({of}); "
                "correct it, or fetch the file once more"
            )
