"""Build a folder's tokenizer: the same token ids as transformers' `AutoTokenizer` gives.

The class that transformers would choose decides what is kept of ``tokenizer.json``. Tokens of the
small files are then added with the same calls of the same library, in the same order.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, processors

from halfmoon_models.bounded_files import (
    list_files,
    parse_json_object,
    read_json_object,
    read_text,
)
from halfmoon_models.errors import BrokenCheckpoint, ModelError, one_line
from halfmoon_models.text_file_checks import (
    MAX_SMALL_BYTES,
    MAX_TOKENIZER_BYTES,
    check_tokenizer,
    without_tokenizer,
)
from halfmoon_models.tokenizer.class_forms import CLASS_FORMS, ClassForm
from halfmoon_models.tokenizer.tekken_file import TEKKEN_FILE, tokenizer_of_tekken
from halfmoon_models.tokenizer.token_settings import TokenSettings, read_token_settings
from halfmoon_models.tokenizer.tokenizer_class import tokenizer_class

#: Small JSON files that decide about tokens.
TOKEN_CONFIGS = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json",
)  # fmt: skip
_VOCABULARY_FILES = ("vocab.json", "merges.txt")
#: Files that a tokenizer may be made of.
TOKENIZER_FILES = ("tokenizer.json", TEKKEN_FILE, *_VOCABULARY_FILES, *TOKEN_CONFIGS)
_MISTRAL_TYPES = frozenset({"mistral", "mistral3", "voxtral", "ministral", "pixtral"})
_MISTRAL_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SAVE_AGAIN = (
    "fetch the file once more, or save the tokenizer again with transformers' AutoTokenizer"
)


@dataclass(frozen=True)
class BuiltTokenizer:
    """A folder's tokenizer, with the texts of its special tokens by role."""

    fast: Tokenizer
    special_tokens: Mapping[str, str]

    @property
    def definition(self) -> str:
        """Write its ``tokenizer.json``, with all added tokens."""
        return str(self.fast.to_str())


def build_tokenizer(folder: Path) -> BuiltTokenizer:
    """Build the tokenizer of a folder; it neither truncates nor pads.

    Raises:
        ModelNotFound: there is none, or none that can be read here; the text has the way out.
        ModelError: a file is damaged.
    """
    names = list_files(folder)
    configs = {
        name: read_json_object(folder / name, MAX_SMALL_BYTES) if name in names else {}
        for name in TOKEN_CONFIGS
    }
    text = (
        read_text(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)
        if "tokenizer.json" in names
        else ""
    )
    _check_file_list(folder, configs["tokenizer_config.json"].get("fast_tokenizer_files"))
    class_name = tokenizer_class(configs["tokenizer_config.json"], configs["config.json"], text)
    form = CLASS_FORMS.get(class_name)
    with _library_errors(folder):
        if text:
            content = parse_json_object(text, str(folder / "tokenizer.json"))
            check_tokenizer(folder / "tokenizer.json", content)
            listed = content.get("added_tokens")
            settings = _settings(folder, configs, listed if isinstance(listed, list) else [], form)
            fast, form = _of_json(text, content, form, configs, settings)
        else:
            settings = _settings(folder, configs, [], form)
            fast, form = _without_json(folder, names, form, configs, settings)
        fast.no_truncation()
        fast.no_padding()
        fast.encode_special_tokens = bool(
            configs["tokenizer_config.json"].get("split_special_tokens")
        )
        _add_tokens(fast, settings)
        _mark_special(fast, settings, form)
        _fix_mistral_words(fast, configs)
        _write_template(fast, settings, form, {} if text else configs["tokenizer_config.json"])
    return BuiltTokenizer(fast, {role: str(token) for role, token in settings.named.items()})


def _check_file_list(folder: Path, listed: Any) -> None:
    """Refuse further tokenizer files outside of the folder, which transformers would open."""
    for name in listed if isinstance(listed, list) else ():
        if not isinstance(name, str) or "/" in name or "\0" in name:
            raise BrokenCheckpoint(
                f"{folder}: fast_tokenizer_files in tokenizer_config.json names "
                f"{one_line(name, 60)!r}; a file of the same folder is wanted: remove the entry"
            )


@contextmanager
def _library_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the library, which raises bare exceptions and panics, into one line."""
    try:
        yield
    except (ModelError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise BrokenCheckpoint(
            f"the tokenizer of {folder} is unusable: {one_line(error, 300)}; {_SAVE_AGAIN}"
        ) from None


def _settings(
    folder: Path,
    configs: Mapping[str, Mapping[str, Any]],
    listed: list[Any],
    form: ClassForm | None,
) -> TokenSettings:
    try:
        return read_token_settings(
            configs, listed, form.tokens if form else {}, form.own_tokens if form else {}
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BrokenCheckpoint(
            f"a tokenizer's file of {folder} is unusable: {one_line(error, 300)}; {_SAVE_AGAIN}"
        ) from None


def _of_json(
    text: str,
    content: Mapping[str, Any],
    form: ClassForm | None,
    configs: Mapping[str, Mapping[str, Any]],
    settings: TokenSettings,
) -> tuple[Tokenizer, ClassForm | None]:
    """Return the tokenizer of a ``tokenizer.json``, and the form that it was made in."""
    model = content["model"]
    vocab, merges = model.get("vocab"), model.get("merges")
    if form is None or not isinstance(vocab, dict) or not isinstance(merges, list):
        return Tokenizer.from_str(text), None
    made = _in_form(form, vocab, merges, configs["tokenizer_config.json"], settings)
    return Tokenizer.from_str(
        json.dumps({**made, "post_processor": content.get("post_processor")})
    ), form


def _without_json(
    folder: Path,
    names: frozenset[str],
    form: ClassForm | None,
    configs: Mapping[str, Mapping[str, Any]],
    settings: TokenSettings,
) -> tuple[Tokenizer, ClassForm | None]:
    if TEKKEN_FILE in names:
        place = folder / TEKKEN_FILE
        tekken = read_json_object(place, MAX_TOKENIZER_BYTES)
        return tokenizer_of_tekken(tekken, str(place)), form
    if form is None or not form.reads_vocabulary or not names.issuperset(_VOCABULARY_FILES):
        raise without_tokenizer(folder, names)
    vocab = read_json_object(folder / "vocab.json", MAX_TOKENIZER_BYTES)
    check_tokenizer(folder / "vocab.json", {"model": {"vocab": vocab}})
    lines = read_text(folder / "merges.txt", MAX_TOKENIZER_BYTES).splitlines()
    merges = [line for line in lines if not line.startswith("#version")]
    made = _in_form(form, vocab, merges, configs["tokenizer_config.json"], settings)
    return Tokenizer.from_str(json.dumps(made)), form


def _in_form(
    form: ClassForm,
    vocab: Mapping[str, int],
    merges: list[Any],
    tokenizer_config: Mapping[str, Any],
    settings: TokenSettings,
) -> dict[str, Any]:
    """Return the ``tokenizer.json`` that a class makes of a vocabulary."""
    normalizer, pre_tokenizer, decoder = form.parts(tokenizer_config)
    model = {
        "type": "BPE",
        **form.model,
        "vocab": vocab,
        "merges": [each.split(" ") if isinstance(each, str) else each for each in merges],
    }
    if "unk_token" in model:
        model["unk_token"] = str(settings.named.get("unk_token", model["unk_token"]))
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _add_tokens(fast: Tokenizer, settings: TokenSettings) -> None:
    there = fast.get_added_tokens_decoder()
    known = {repr(token) for token in there.values()}
    new: list[str | AddedToken] = [each for each in settings.added if repr(each) not in known]
    texts = {each.content for each in there.values()} | {str(each) for each in new}
    for token in (*settings.named.values(), *settings.extra):
        if str(token) not in texts and token not in new:
            new.append(token)
    roles = {str(token) for token in settings.named.values()}
    for token in new:
        if isinstance(token, AddedToken) and str(token) in roles:
            token.special = True
    if new:
        fast.add_tokens(
            [AddedToken(each, special=True) if isinstance(each, str) else each for each in new]
        )


def _mark_special(fast: Tokenizer, settings: TokenSettings, form: ClassForm | None) -> None:
    """Make special tokens of those that were in the vocabulary, where the class does."""
    if form is None or not form.afterwards:
        return
    tokens = [*settings.named.values(), *settings.extra]
    if form.afterwards == "mark":
        texts = dict.fromkeys(map(str, tokens))
        fast.add_tokens([AddedToken(text, special=True) for text in texts])
    else:
        fast.add_special_tokens(
            [
                AddedToken(each, special=True, normalized=False) if isinstance(each, str) else each
                for each in tokens
            ]
        )


def _fix_mistral_words(fast: Tokenizer, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Split words as Mistral's own tokenizer does, where `fix_mistral_regex` asks for it."""
    config, pre_tokenizer = configs["config.json"], fast.pre_tokenizer
    release = str(config.get("transformers_version") or "0").split(".")[0]
    if (
        configs["tokenizer_config.json"].get("fix_mistral_regex") is not True
        or fast.get_vocab_size() <= 100_000
        or pre_tokenizer is None
        or not config
        or config.get("model_type", "mistral") not in _MISTRAL_TYPES
        or (release.isdecimal() and int(release) >= 5)
    ):
        return
    words = pre_tokenizers.Split(Regex(_MISTRAL_WORDS), "isolated")
    if isinstance(pre_tokenizer, pre_tokenizers.Sequence):
        pre_tokenizer[0] = words
        fast.pre_tokenizer = pre_tokenizer
        return
    if isinstance(pre_tokenizer, pre_tokenizers.Metaspace):
        pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizer])


def _write_template(
    fast: Tokenizer,
    settings: TokenSettings,
    form: ClassForm | None,
    tokenizer_config: Mapping[str, Any],
) -> None:
    """Write BOS and EOS around texts as a config says; it is empty if tokenizer.json decides."""
    asked = "add_bos_token" in tokenizer_config or "add_eos_token" in tokenizer_config
    if not (asked or fast.post_processor is None or (form is not None and form.resets_template)):
        return
    adds = {"add_bos_token": form is not None and form.adds_bos, **tokenizer_config}
    ends = {
        role: str(settings.named[role])
        for role in ("bos_token", "eos_token")
        if adds.get(f"add_{role}") and role in settings.named
    }
    parts = (ends.get("bos_token"), "$A", ends.get("eos_token"))
    fast.post_processor = processors.TemplateProcessing(
        single=[part for part in parts if part is not None],
        pair=None,
        special_tokens=[(text, fast.token_to_id(text)) for text in set(ends.values())],
    )
