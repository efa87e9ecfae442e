"""Cache token ids by word, and assemble those of short English-like texts from them.

A byte-level BPE splits a text into words by a regular expression, and each word into tokens by
itself. So a text's ids are the ids of its words in order, and nearly all words have occurred
before. The tokenizer also builds words, offsets and strings that are not needed here. Chat
templates write special tokens between messages. These split a text first, and each has an id of its
own.

Without the cache, a request with 512 tokens of text, its words known, takes 2.7 times the CPU time
(``python -m benchmarks.conductor.ablations``).

Texts whose splitting may differ are left to the tokenizer:

- Texts with letters or digits that are not ASCII, for which `re` has other classes.
- Texts with an added token that absorbs adjacent whitespace or has other special matching.
- Long texts, as `re` holds the GIL.
- All texts of tokenizers with any part that `_word_pattern` does not know.
"""

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
from tokenizers import Tokenizer

#: Longer texts are left to the tokenizer: `re` holds the interpreter's lock while it cuts.
MAX_TEXT_CHARACTERS = 8192
#: Most new words of one text. A word by itself takes the tokenizer three times as long as within a
#: text.
_MAX_NEW_WORDS = 64
#: Longer words seldom occur again.
_MAX_WORD_CHARACTERS = 32
#: Most words that are cached, some 12 MB of them; with more, all are dropped.
MAX_WORDS = 1 << 16

#: GPT-2's words, by which a byte-level pre-tokenizer splits unless configured otherwise.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: Words of Llama 3, with up to three digits in a word, and of Qwen, with one.
_LLAMA, _QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in ("{1,3}", "")
)
#: The same patterns for `re`, where letters and digits are ASCII.
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
#: Neither ASCII nor punctuation of English texts, which is no letter, digit or space.
_FOREIGN = re.compile(r"[^\x00-\x7f–—‘’“”…•]")
#: A cache that disagrees with its tokenizer on this text is not used.
_PROBE = "It's  a PROBE, isn't he'LL?\r\n\n \t1234 x_1\n   {'re}=[0.5];  \x00\x1f a\x0b b "
#: Most special tokens that are probed: a tokenizer may have hundreds.
_MAX_PROBED = 32

#: Token ids by word.
WordIds = dict[str, tuple[int, ...]]


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

    def splits_anywhere(self) -> bool:
        """Return whether it is a token wherever it occurs, and leaves adjacent text unchanged."""
        return not (self.single_word or self.lstrip or self.rstrip or self.normalized)


class _TokenizerFile(msgspec.Struct):
    """The parts of a ``tokenizer.json`` that decide where words end."""

    model: _Model
    normalizer: Any = None
    pre_tokenizer: Any = None
    added_tokens: list[_Added] = []


class WordCache:
    """Cache the words of one tokenizer; usable from any thread."""

    def __init__(
        self, tokenizer: Tokenizer, words: re.Pattern[str], added: Sequence[_Added]
    ) -> None:
        """Create a cache; see `open`."""
        self._tokenizer = tokenizer
        self._words = words
        token_ids: WordIds = {
            token.content: (token.id,) for token in added if token.splits_anywhere()
        }
        self._excluded_tokens = tuple(
            token.content for token in added if not token.splits_anywhere()
        )
        #: Matches the longest token at each position, as the tokenizer does.
        self._token_pattern = re.compile(
            "("
            + ("|".join(map(re.escape, sorted(token_ids, key=len, reverse=True))) or "(?!)")
            + ")"
        )
        #: First characters of these tokens: a tokenizer may have hundreds that begin alike.
        self._token_starts = tuple({token.content[:2] for token in added})
        #: No word equals such a token, since a text is split at tokens first.
        self._token_ids = token_ids
        #: Replaced when it is full, so that other threads keep reading the old one.
        self._word_ids: WordIds = dict(token_ids)
        self._affixes = self._find_affixes()

    @classmethod
    def open(cls, content: bytes, tokenizer: Tokenizer) -> "WordCache | None":
        """Return the cache of a tokenizer, or None if its words are not known.

        Args:
            content: the content of its ``tokenizer.json``.
            tokenizer: made of that content, without truncation and padding.
        """
        try:
            file = msgspec.json.decode(content, type=_TokenizerFile)
        except msgspec.MsgspecError:
            return None
        words = _IN_PYTHON.get(_word_pattern(file))
        if words is None:
            return None
        cache = cls(tokenizer, words, file.added_tokens)
        tokens = [token.content for token in file.added_tokens if token.splits_anywhere()]
        for probe in (_PROBE, _probe_of_tokens(tokens[:_MAX_PROBED])):
            for special in (False, True):
                expected = _encode_all(tokenizer, [probe], special)[0]
                if cache.encode(probe, add_special_tokens=special) not in (None, expected):
                    return None
        return cache

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """Return the token ids of a text; None: ask the tokenizer."""
        if len(text) > MAX_TEXT_CHARACTERS or (not text.isascii() and _FOREIGN.search(text)):
            return None
        if any(each in text for each in self._token_starts):
            if any(each in text for each in self._excluded_tokens):
                return None
            words = self._cut_at_tokens(text)
        else:
            words = self._words.findall(text)
        word_ids = self._word_ids
        try:
            ids = list(chain.from_iterable(map(word_ids.__getitem__, words)))
        except KeyError:
            learned = self._learn(words, word_ids)
            if learned is None:
                return None
            ids = list(chain.from_iterable(map(learned.__getitem__, words)))
        if add_special_tokens:
            before, after = self._affixes
            return [*before, *ids, *after]
        return ids

    def _cut_at_tokens(self, text: str) -> list[str]:
        """Split a text into special tokens and the words between them."""
        words: list[str] = []
        between, *rest = self._token_pattern.split(text)
        words += self._words.findall(between)
        for token, after in zip(rest[::2], rest[1::2], strict=True):
            words.append(token)
            words += self._words.findall(after)
        return words

    def _learn(self, words: list[str], word_ids: WordIds) -> WordIds | None:
        """Add new words; return the cache, or None if the words are too many or too long."""
        new = [word for word in dict.fromkeys(words) if word not in word_ids]
        if max(map(len, new)) > _MAX_WORD_CHARACTERS:
            return None
        added_words = new[:_MAX_NEW_WORDS]
        if len(word_ids) + len(added_words) > MAX_WORDS:
            self._word_ids = dict(self._token_ids)
            return None
        word_ids.update(
            zip(
                added_words,
                map(tuple, _encode_all(self._tokenizer, added_words, False)),
                strict=True,
            )
        )
        return word_ids if len(added_words) == len(new) else None

    def _find_affixes(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer puts before and after a text."""
        (bare,), (whole,) = (
            _encode_all(self._tokenizer, ["a"], special) for special in (False, True)
        )
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        return [], []  # the probe finds the difference


def _word_pattern(file: _TokenizerFile) -> str:
    """Return the pattern that splits words if it alone decides the ids; else an empty text."""
    model = file.model
    if model.type != "BPE" or model.dropout:
        return ""
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return ""
    if file.normalizer not in (None, {"type": "NFC"}):  # which leaves ASCII as it is
        return ""
    match file.pre_tokenizer:
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


def _probe_of_tokens(tokens: list[str]) -> str:
    """Return a text with tokens between lines, words, spaces and one another, as in chats."""
    return "".join(f"{token}user\n\n x_1 {token}\n{token}  a  " for token in tokens)


def _encode_all(tokenizer: Tokenizer, texts: list[str], special: bool) -> list[list[int]]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=special)
    return [encoding.ids for encoding in encodings]
