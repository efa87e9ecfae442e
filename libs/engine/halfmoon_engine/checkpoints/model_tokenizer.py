"""Check at a worker's start that a folder's tokenizer is read as transformers reads it.

The conductor builds the tokenizer without transformers. So a worker builds it too, and compares it
with transformers' own on a text of all scripts and all added tokens.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers as _transformers
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from halfmoon_engine.checkpoints.hub_offline import hub_offline
from halfmoon_engine.checkpoints.inspected_files import folder_of_tokenizer
from halfmoon_models.bounded_files import list_files
from halfmoon_models.errors import UnsupportedModel, one_line
from halfmoon_models.text_file_checks import has_tokenizer, vocabulary_size
from halfmoon_models.tokenizer.embedded_tokens import (
    embedded_definition,
    unembedded_tokens,
    unembedded_warning,
)
from halfmoon_models.tokenizer.end_tokens import find_end_tokens
from halfmoon_models.tokenizer.tokenizer_builder import BuiltTokenizer, build_tokenizer
from halfmoon_models.tokenizer.turn_end import Render

log = logging.getLogger(__name__)
transformers: Any = _transformers

#: Ordinary texts: words, numbers, code, accents in both forms, scripts, emoji, spaces, controls.
PROBE_TEXTS = (
    "The half moon isn't full: it's 1984, 3.14159 and 1,000,000! HE'LL won't YOU'RE?",
    "def moon(x):\n\tif x == [1, 2]:\r\n        return {'half': x_1}  # <b>&amp;</b>\n\n\n",
    "naïve Ünïcode ﬁne Ⅷ ½ e\u0301 \u212b ñ İstanbul ß ǅ",
    "半月は美しい。カタカナ がギ 漢字１２３ 한국어 조선글 中文，标点！",
    "עִבְרִית العَرَبِيّة ١٢٣ हिन्दी ক্ষ தமிழ் ไทย ខ្មែរ ქართული Ελληνικά Русский язык",
    "🌙👩\u200d🚀🇰🇷 ☾ ∀x∈ℝ: √2 ≈ 1.41 \u00a0\u2003\u200b\ufeff\x00\x7f",
    "  two  spaces,   three ",
    " ",
)
#: Most added tokens that are probed; models reserve some thousands.
_MAX_PROBED = 20_000
_SHOWN = 80


@dataclass(frozen=True)
class ModelTokenizer:
    """Hold what an engine needs of a folder's tokenizer."""

    #: Its ``tokenizer.json``, with all tokens that the model embeds.
    definition: str
    #: Ends of an answer, each with the place that names it first.
    end_tokens: Mapping[int, str]


@hub_offline()
def read_model_tokenizer(folder: Path, config: Mapping[str, Any]) -> ModelTokenizer | None:
    """Read and check the tokenizer of a folder; return None if it has none that is read here.

    Raises:
        UnsupportedModel: transformers gives other tokens for a text, which the error names.
        ModelError: a file is damaged.
    """
    if not has_tokenizer(list_files(folder)):
        log.warning("%s has no tokenizer, so requests with a grammar can't be served", folder)
        return None
    built = build_tokenizer(folder)
    n_embedded = vocabulary_size(config)
    if unembedded := unembedded_tokens(folder, built, n_embedded):
        log.warning("%s", unembedded_warning(folder, unembedded, n_embedded or 0))
    with folder_of_tokenizer(folder, config) as copied:
        theirs = _load(folder, copied)
    if theirs is not None:
        check_same_tokens(folder, built, theirs)
    ends = find_end_tokens(folder, built, None if theirs is None else _renderer(theirs))
    shown = ", ".join(f"{token} ({place})" for token, place in ends.items())
    log.info("an answer ends at %s", shown or "no token: only a limit or a stop string ends it")
    return ModelTokenizer(embedded_definition(built, unembedded), ends)


def check_same_tokens(folder: Path, built: BuiltTokenizer, theirs: Any) -> None:
    """Compare a tokenizer with transformers' own.

    Raises:
        UnsupportedModel: naming a text or a token where they differ.
    """
    ours = {i: repr(token) for i, token in built.fast.get_added_tokens_decoder().items()}
    wanted = {i: repr(token) for i, token in theirs.added_tokens_decoder.items()}
    for token in sorted(ours.keys() | wanted.keys()):
        if (mine := ours.get(token)) != (its := wanted.get(token)):
            raise _differs(folder, theirs, f"token {token} is {mine} here and {its} there")
    texts = [*PROBE_TEXTS, *_added_texts(theirs)]
    for adds_special in (False, True):
        expected = theirs(texts, add_special_tokens=adds_special)["input_ids"]
        encoded = built.fast.encode_batch_fast(texts, add_special_tokens=adds_special)
        for text, encoding, ids in zip(texts, encoded, expected, strict=True):
            if encoding.ids != ids:
                raise _differs(folder, theirs, _difference(text, encoding.ids, ids))


def _added_texts(theirs: Any) -> Iterator[str]:
    """Yield each added token within words and beside spaces, many in one text."""
    added = [str(token) for token in theirs.added_tokens_decoder.values()][:_MAX_PROBED]
    for first in range(0, len(added), 16):
        yield "".join(f"moon{text}half {text}  x" for text in added[first : first + 16])


def _difference(text: str, ours: Sequence[int], theirs: Sequence[int]) -> str:
    pairs = enumerate(zip(ours, theirs, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    return (
        f"{text[:_SHOWN]!r} is {len(ours)} tokens here and {len(theirs)} there, which differ from "
        f"token {place} on: {list(ours[place : place + 3])} and {list(theirs[place : place + 3])}"
    )


def _differs(folder: Path, theirs: Any, how: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{folder}: its tokenizer is read otherwise than by transformers "
        f"{transformers.__version__} ({type(theirs).__name__}): {one_line(how, 300)}. Save it "
        "again with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), and name "
        "PreTrainedTokenizerFast as tokenizer_class in its tokenizer_config.json"
    )


def _load(folder: Path, copied: Path) -> Any:
    """Load transformers' tokenizer; return None where it needs code of the folder, or fails.

    Args:
        folder: of the model, for messages.
        copied: what transformers reads in its place.
    """
    try:
        for name in ("tokenizer_config.json", "config.json"):
            _check_class(copied / name)
        with _without_logs():
            return transformers.AutoTokenizer.from_pretrained(
                copied, local_files_only=True, trust_remote_code=False, mistral_format=False
            )
    except BaseException as error:  # a panic in a library of Rust is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        log.warning(
            "%s: transformers can't load its tokenizer, so its tokens are not compared: %s",
            folder,
            one_line(error, 300),
        )
        return None


def _check_class(place: Path) -> None:
    """Refuse a class that is no tokenizer: transformers loads anything of its own by this name.

    Raises:
        UnsupportedModel: naming the field and the class.
    """
    content = json.loads(place.read_bytes()) if place.exists() else {}
    named = str(content.get("tokenizer_class") or "")
    for name in {named.removesuffix("Fast"), f"{named.removesuffix('Fast')}Fast"} if named else ():
        found = tokenizer_class_from_name(name)
        if found is not None and not (
            isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase)
        ):
            raise UnsupportedModel(
                f"tokenizer_class in {place.name} is {one_line(named, 60)!r}, which is no "
                "tokenizer of transformers: name PreTrainedTokenizerFast"
            )


@contextmanager
def _without_logs() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _renderer(theirs: Any) -> Render | None:
    if not theirs.chat_template:
        return None

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        return str(theirs.apply_chat_template(list(messages), tokenize=False))

    return render
