"""Make prompts of 512 tokens, as ids and as text, and their tokenizer.

The tokenizer is a byte-level BPE trained on this repository's own documents.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

N_TOKENS = 512
_VOCABULARY = 8192
_DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Prompts:
    """What is asked, as JSON values."""

    #: Folder with the tokenizer.
    tokenizer: Path
    ids: list[msgspec.Raw]
    texts: list[msgspec.Raw]
    short_text: msgspec.Raw
    #: Tokens that are words of their own, for the engine to say.
    words: list[int]

    @classmethod
    def make(cls, folder: Path, dice: random.Random, n: int) -> "Prompts":
        """Train the tokenizer into `folder`, and draw `n` prompts of either kind."""
        tokenizer = _trained()
        folder.mkdir()
        tokenizer.save(str(folder / "tokenizer.json"))
        words = [
            token
            for piece, token in tokenizer.get_vocab().items()
            if piece.startswith("Ġ") and piece[1:].isascii() and piece[1:].isalpha()
        ]
        words.sort()
        ids: list[msgspec.Raw] = []
        texts: list[msgspec.Raw] = []
        for _ in range(n):
            drawn = dice.choices(words, k=N_TOKENS)
            text = tokenizer.decode(drawn)
            assert len(tokenizer.encode(text).ids) == N_TOKENS
            ids.append(msgspec.Raw(msgspec.json.encode(drawn)))
            texts.append(msgspec.Raw(msgspec.json.encode(text)))
        return cls(folder, ids, texts, msgspec.Raw(b'"three words"'), words[:100])


def _trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = sorted(_DOCS.rglob("*.md"))
    tokenizer.train_from_iterator((path.read_text("utf-8") for path in documents), trainer)
    return tokenizer
