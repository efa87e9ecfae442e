"""Pieces of text, token by token, join to what decoding everything gives, up to a stop string."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from halfmoon_conductor.text.detokenizer import (
    REPLACEMENT,
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
)
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_conductor.text.stop_strings import StopStringMatcher
from halfmoon_conductor.text.text_stream import TextStream

TEXTS = st.text(st.sampled_from("the moon half.,'\n 半月🌗é\u0301"), max_size=40)


def stream(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [detokenizer.push(token) for token in token_ids] + [detokenizer.flush()]


@given(data=st.data())
def test_any_tokens_of_a_byte_level_tokenizer_join_to_their_decoding(
    tokenizer: HubTokenizer, data: st.DataObject
) -> None:
    known = st.integers(0, tokenizer.vocab_size + 3)  # a few that don't exist, too
    token_ids = data.draw(st.lists(known, max_size=30))
    detokenizer = tokenizer.detokenizer()
    assert isinstance(detokenizer, ByteDetokenizer)
    assert "".join(stream(detokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_a_character_comes_out_with_its_last_byte_or_as_broken(tokenizer: HubTokenizer) -> None:
    tokens = {tokenizer._token_bytes(token): token for token in range(tokenizer.vocab_size)}
    token_ids = [tokens[bytes([byte])] for byte in "🌗".encode()]
    assert stream(tokenizer.detokenizer(), token_ids) == ["", "", "", "🌗", ""]
    assert stream(tokenizer.detokenizer(), token_ids[:2]) == ["", "", REPLACEMENT]


def metaspace() -> Tokenizer:
    """As SentencePiece models come: spaces are ▁, unknown characters fall back to bytes."""
    letters = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ["<unk>", "▁", *"themonalf", "th", "the", "▁the", "▁m", "oo", "half"]:
        letters.setdefault(piece, len(letters))
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "m"), ("o", "o")]
    tokenizer = Tokenizer(
        models.BPE(vocab=letters, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT has it: ## marks what goes on a word."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=60, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(["the half moon, the moon 半月 🌗 é"], trainer)
    return tokenizer


@pytest.fixture(scope="module", params=[metaspace, word_piece])
def other(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.param()
    return tokenizer


@given(text=TEXTS)
def test_texts_of_other_tokenizers_join_to_their_decoding(other: Tokenizer, text: str) -> None:
    token_ids = other.encode(text).ids
    detokenizer = WindowDetokenizer(other.decode, frozenset())
    said = ""
    for token in token_ids:
        said += detokenizer.push(token)
        detokenizer.check()
    assert said + detokenizer.flush() == other.decode(token_ids)


def test_a_window_decodes_a_bounded_number_of_tokens_for_each_new_one() -> None:
    lengths: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        lengths.append(len(token_ids))
        return REPLACEMENT * len(token_ids)

    detokenizer = WindowDetokenizer(decode, frozenset())
    said = sum(len(detokenizer.push(1)) for _ in range(500)) + len(detokenizer.flush())
    assert said == 500
    assert max(lengths) <= 16


def test_stop_strings_are_not_looked_for_in_the_first_tokens(tokenizer: HubTokenizer) -> None:
    token_ids = [token for a in "abab" for token in tokenizer.encode(a, add_special_tokens=False)]
    answer = TextStream(tokenizer.detokenizer(), ["ab"], min_tokens=2)
    assert "".join(answer.push(token) for token in token_ids) + answer.finish() == "ab"
    assert answer.stopped


# -- stop strings --------------------------------------------------------------------------------

letters = st.text("ab", max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def cut(text: str, patterns: list[str]) -> str:
    """By definition: the first to be complete, of those the longest."""
    ends = [
        (start + len(pattern), start)
        for pattern in patterns
        for start in range(len(text))
        if text.startswith(pattern, start)
    ]
    return text[: min(ends)[1]] if ends else text


@given(pieces=st.lists(letters, max_size=8), patterns=stops)
@example(pieces=["aaaab"], patterns=["aab"])
@example(pieces=["ab", "b"], patterns=["a"])
def test_the_text_ends_before_the_first_complete_stop_string_however_it_is_cut(
    pieces: list[str], patterns: list[str]
) -> None:
    matcher = StopStringMatcher(patterns)
    said = ""
    for piece in pieces:
        said += matcher.feed(piece)
        matcher.check()
    said += matcher.flush()
    assert said == cut("".join(pieces), patterns)
    assert (matcher.matched is not None) == any(each in "".join(pieces) for each in patterns)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStringMatcher(["a", ""])
