"""Token ids of short English-like texts, put together from words that were met before.

A byte-level BPE cuts a text into words by a regular expression, and makes tokens of each word
by itself. So a text's ids are those of its words in a row, and nearly all words of a text were
in an earlier one: cutting and looking up takes a fifth of what the tokenizer takes, which builds
words, offsets and strings that nobody here reads. Special tokens, which chat templates write
between the turns, part a text first, and each has an id of its own.

Whatever is not known to be cut in the same way is left to the tokenizer: texts with letters or
digits that are not ASCII, for which `re` has other classes; texts with an added token in them
that takes the spaces beside it along, or is looked for in some other way than by itself; long
ones, as `re` holds the interpreter's lock; and tokenizers with any part but those in
`_cut_by`.
"""

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
from tokenizers import Tokenizer

#: Longer texts are left to the tokenizer: `re` holds the interpreter's lock while it cuts.
MAX_TEXT_CHARACTERS = 8192
#: Of one text. A word by itself takes three times what it takes within its text.
_MAX_NEW_WORDS = 64
#: Longer words are seldom met again.
_MAX_WORD_CHARACTERS = 32
#: Remembered at once, some 12 MB of them; more, and all are forgotten.
MAX_WORDS = 1 << 16

#: GPT-2's words, which a byte-level pre-tokenizer cuts unless told otherwise.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: Those of Llama 3 with up to three digits in a word, and of Qwen with one.
_LLAMA, _QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in ("{1,3}", "")
)
#: The same for `re`, where letters and digits are ASCII.
_IN_PYTHON = {
    pattern: re.compile(
        pattern.replace(r"\r\n\p{L}\p{N}", r"\r\nA-Za-z0-9")
        .replace(r"\s\p{L}\p{N}", r"\sA-Za-z0-9")
        .replace(r"\p{L}", "[A-Za-z]")
        .replace(r"\p{N}", "[0-9]"),
        re.ASCII,
    )
    for pattern in (_GPT2, _LLAMA, _QWEN)
}
#: Neither ASCII nor signs that English texts are set with, which are no letter, digit or space.
_FOREIGN = re.compile(r"[^\x00-\x7f–—‘’“”…•]")
#: A cache that disagrees with its tokenizer here is not used.
_PROBE = "It's  a PROBE, isn't he'LL?\r\n\n \t1234 x_1\n   {'re}=[0.5];  \x00\x1f a\x0b b "
#: Of the special tokens, so many are probed: a tokenizer may have hundreds.
_MAX_PROBED = 32

#: Words, and the ids of each.
Known = dict[str, tuple[int, ...]]


class _Model(msgspec.Struct):
    type: str = ""
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _Added(msgspec.Struct):
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True

    def parts(self) -> bool:
        """Whether it is a token wherever it stands, and what is beside it is as without it."""
        return not (self.single_word or self.lstrip or self.rstrip or self.normalized)


class _Parts(msgspec.Struct):
    """Of a ``tokenizer.json``, what decides where words end."""

    model: _Model
    normalizer: Any = None
    pre_tokenizer: Any = None
    added_tokens: list[_Added] = []


class WordCache:
    """For one tokenizer; from any thread."""

    def __init__(
        self, tokenizer: Tokenizer, words: re.Pattern[str], added: Sequence[_Added]
    ) -> None:
        """See `open`."""
        self._tokenizer = tokenizer
        self._words = words
        parting: Known = {token.content: (token.id,) for token in added if token.parts()}
        self._odd = tuple(token.content for token in added if not token.parts())
        #: The longest of those that begin at one place, as the tokenizer takes them.
        self._parting = re.compile(
            "(" + ("|".join(map(re.escape, sorted(parting, key=len, reverse=True))) or "(?!)") + ")"
        )
        #: How these begin, in a few characters: many a tokenizer has hundreds that begin alike.
        self._beginnings = tuple({token.content[:2] for token in added})
        #: No word is a parting token, since these are taken out of a text before it is cut.
        self._always = parting
        #: Replaced when it is full, so that who reads it keeps what it has.
        self._known: Known = dict(parting)
        self._around = self._specials()

    @classmethod
    def open(cls, content: bytes, tokenizer: Tokenizer) -> "WordCache | None":
        """The cache of a tokenizer, if it is one whose words are known.

        Args:
            content: of its ``tokenizer.json``.
            tokenizer: made of that, and neither cutting nor padding texts.
        """
        try:
            parts = msgspec.json.decode(content, type=_Parts)
        except msgspec.MsgspecError:
            return None
        words = _IN_PYTHON.get(_cut_by(parts))
        if words is None:
            return None
        cache = cls(tokenizer, words, parts.added_tokens)
        tokens = [token.content for token in parts.added_tokens if token.parts()]
        for probe in (_PROBE, _turns(tokens[:_MAX_PROBED])):
            for special in (False, True):
                asked = _asked(tokenizer, [probe], special)[0]
                if cache.encode(probe, add_special_tokens=special) not in (None, asked):
                    return None
        return cache

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """Token ids of a text, as the tokenizer has them; None: ask the tokenizer."""
        if len(text) > MAX_TEXT_CHARACTERS or (not text.isascii() and _FOREIGN.search(text)):
            return None
        if any(each in text for each in self._beginnings):
            if any(each in text for each in self._odd):
                return None
            words = self._cut_at_tokens(text)
        else:
            words = self._words.findall(text)
        known = self._known
        try:
            ids = list(chain.from_iterable(map(known.__getitem__, words)))
        except KeyError:
            learnt = self._learn(words, known)
            if learnt is None:
                return None
            ids = list(chain.from_iterable(map(learnt.__getitem__, words)))
        if add_special_tokens:
            before, after = self._around
            return [*before, *ids, *after]
        return ids

    def _cut_at_tokens(self, text: str) -> list[str]:
        """Parting tokens, and the words between them."""
        words: list[str] = []
        between, *rest = self._parting.split(text)
        words += self._words.findall(between)
        for token, after in zip(rest[::2], rest[1::2], strict=True):
            words.append(token)
            words += self._words.findall(after)
        return words

    def _learn(self, words: list[str], known: Known) -> Known | None:
        """What is known with the words that were new; None: these are too many, or too long."""
        new = [word for word in dict.fromkeys(words) if word not in known]
        if max(map(len, new)) > _MAX_WORD_CHARACTERS:
            return None
        kept = new[:_MAX_NEW_WORDS]
        if len(known) + len(kept) > MAX_WORDS:
            self._known = dict(self._always)
            return None
        known.update(zip(kept, map(tuple, _asked(self._tokenizer, kept, False)), strict=True))
        return known if len(kept) == len(new) else None

    def _specials(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and after a text."""
        (bare,), (whole,) = (_asked(self._tokenizer, ["a"], special) for special in (False, True))
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        return [], []  # the probe will tell


def _cut_by(parts: _Parts) -> str:
    """The pattern that a tokenizer cuts words by, if they alone decide the ids; else empty."""
    model = parts.model
    if model.type != "BPE" or model.dropout:
        return ""
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return ""
    if parts.normalizer not in (None, {"type": "NFC"}):  # which leaves ASCII as it is
        return ""
    match parts.pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, **more} if more.get(
            "use_regex", True
        ):
            return _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": str(pattern)},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
        case _:
            return ""


def _turns(tokens: list[str]) -> str:
    """Tokens as chat templates set them: between lines, words, spaces and one another."""
    return "".join(f"{token}user\n\n x_1 {token}\n{token}  a  " for token in tokens)


def _asked(tokenizer: Tokenizer, texts: list[str], special: bool) -> list[list[int]]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=special)
    return [encoding.ids for encoding in encodings]
