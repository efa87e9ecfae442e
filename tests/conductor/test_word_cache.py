"""Ids put together from remembered words are those that the tokenizer itself gives."""

import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from halfmoon_conductor.text import word_cache
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_conductor.text.word_cache import WordCache

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA.replace("{1,3}", "")
CORPUS = [
    "It's the half moon, isn't it? They'll say we'd seen 1234 of them; I'M sure.\r\n\r\n",
    "def moon(x_1, *, half=0.5):\n    return {'x': x_1}  # we've\n\tor 'not'\n\n\n  <end> ",
    "It’s – “half” … we’re • x—y — ‘moon’ …\n– “\n",
    "été, déjà, Größe; 半月 半月 ?\x1f?\x1f? ?\x1f?\x1f? x\x1cx x\x1cx",
] * 3


def trained(pre_tokenizer: Any, *, around: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=["<s>", "<|end|>"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("moonlight", lstrip=True, single_word=True)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<|e", "?\n", " =")])
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A <|end|>", special_tokens=[("<s>", 0), ("<|end|>", 1)]
        )
    return tokenizer


def split(pattern: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


TOKENIZERS = {
    "gpt2": trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama": trained(split(LLAMA), around=True),
    "qwen": trained(split(QWEN)),
}
TOKENIZERS["qwen"].normalizer = normalizers.NFC()

ODD_PIECES = [
    "<|end|>", "<s>", "<|", "<|e", "?\n", " =", "moonlight", " moonlight", "半月 🌗", "été",
    "<|end|>user\n\nIt's half? <|end|>\n<s>", "e\u0301", "?\x1f?",
]  # fmt: skip
#: Characters and pieces at which a regular expression might cut elsewhere.
ODD_TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(max_codepoint=127), max_size=8),
        st.text(" \t\r\n\x0b\x0c\x1c\x1d\x85\xa0", max_size=6),
        st.text("'sStTrREeVvMmLlDdſ ", max_size=6),
        st.text("–—‘’“”…•' as1", max_size=6),
        st.sampled_from(ODD_PIECES),
        st.text(max_size=4),
    ),
    max_size=8,
).map("".join)


class Asked:
    """A tokenizer that keeps what it is asked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.texts += texts
        return self._tokenizer.encode_batch_fast(texts, **options)


def opened(tokenizer: Tokenizer, asked: Asked | None = None) -> WordCache:
    made = WordCache.open(tokenizer.to_str().encode(), cast(Tokenizer, asked or tokenizer))
    assert made is not None
    return made


@pytest.fixture(params=TOKENIZERS, scope="module")
def plain(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


@pytest.fixture(scope="module")
def hub(plain: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> HubTokenizer:
    """The same, as the front has it: with a cache."""
    folder = tmp_path_factory.mktemp("words")
    plain.save(str(folder / "tokenizer.json"))
    return HubTokenizer(folder)


@given(text=ODD_TEXTS, special=st.booleans())
@example(text="", special=True)
@example(text="  two  spaces ", special=True)
@example(text="'ſ isn'T\x1c it's\r\n \r\n1234567", special=False)
@example(text="It’s – “half” …\n– we’re •x—y", special=False)
@example(text="?\x1f?", special=False)
@example(text="by moonlight, in moonlights", special=True)
@example(text="<s><s>half?\n\n moon <|end|> \n<|end  x =\n<|e<|end|>|>", special=True)
def test_odd_texts_have_the_tokens_that_they_have_without_a_cache(
    plain: Tokenizer, hub: HubTokenizer, text: str, special: bool
) -> None:
    assert hub._word_cache is not None
    expected = plain.encode(text, add_special_tokens=special).ids
    learning, knowing = [hub.encode(text, add_special_tokens=special) for _ in range(2)]
    assert learning == knowing == expected


def test_a_word_is_asked_for_once() -> None:
    plain = TOKENIZERS["gpt2"]
    asked = Asked(plain)
    cache = opened(plain, asked)
    asked.texts.clear()
    cache.encode("half by moon is half", add_special_tokens=False)
    assert asked.texts == ["half", " by", " moon", " is", " half"]
    cache.encode("half is half by moon more", add_special_tokens=False)
    assert asked.texts[5:] == [" more"]


def test_of_many_new_words_a_few_are_learnt_at_a_time() -> None:
    plain = TOKENIZERS["gpt2"]
    asked = Asked(plain)
    cache = opened(plain, asked)
    text, tries = " ".join(f"w{number}" for number in range(100)), []
    for _ in range(3):
        asked.texts.clear()
        ids = cache.encode(text, add_special_tokens=False)
        tries.append((ids is not None, len(asked.texts)))
    assert tries == [(False, 64), (True, 35), (True, 0)]
    assert ids == plain.encode(text).ids


def test_no_more_words_are_remembered_than_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "MAX_WORDS", 40)
    plain = TOKENIZERS["llama"]
    cache = opened(plain)
    for number in range(100):
        text = f"moon {number} half {number + 1} moon"
        assert cache.encode(text, add_special_tokens=True) in (None, plain.encode(text).ids)
        assert len(cache._word_ids) <= 40
    assert cache.encode(text, add_special_tokens=True) == plain.encode(text).ids


def _with(change: Callable[[dict[str, Any]], object]) -> bytes:
    content = json.loads(TOKENIZERS["gpt2"].to_str())
    change(content)
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.update(normalizer={"type": "Lowercase"}),
        lambda file: file.update(pre_tokenizer=None),
        lambda file: file["pre_tokenizer"].update(add_prefix_space=True),
        lambda file: file["pre_tokenizer"].update(use_regex=False),
        lambda file: file["model"].update(dropout=0.1),
        lambda file: file["model"].update(end_of_word_suffix="</w>"),
        lambda file: file["model"].update(type="Unigram"),
        lambda file: file.update(model=None),
    ],
)
def test_other_tokenizers_have_no_cache(change: Callable[[dict[str, Any]], object]) -> None:
    tokenizer = TOKENIZERS["gpt2"]
    assert WordCache.open(_with(lambda file: None), tokenizer) is not None
    assert WordCache.open(_with(change), tokenizer) is None


def test_a_tokenizer_without_special_tokens_has_a_cache() -> None:
    content = _with(lambda file: file.update(added_tokens=[]))
    tokenizer = Tokenizer.from_str(content.decode())
    cache = WordCache.open(content, tokenizer)
    assert cache is not None
    text = "the <|end|> of it"
    assert cache.encode(text, add_special_tokens=False) == tokenizer.encode(text).ids


def test_a_cache_that_disagrees_with_its_tokenizer_is_not_used() -> None:
    swapped = _with(lambda file: file["added_tokens"][0].update(id=1))
    assert WordCache.open(swapped, TOKENIZERS["gpt2"]) is None
    claimed, actual = TOKENIZERS["qwen"], TOKENIZERS["llama"]
    assert WordCache.open(claimed.to_str().encode(), actual) is None
