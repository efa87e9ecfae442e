"""Define what the conductor needs of a tokenizer."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

from halfmoon_conductor.text.detokenizer import Detokenizer


class TokenizerUnavailable(Exception):
    """Raised when a model spec has no usable tokenizer; the text says what is missing."""


class Tokenizer(Hashable, Protocol):
    """Convert texts to token ids and back. Methods may be called from any thread."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; all ids are less."""
        ...

    @property
    def longest_token_bytes(self) -> int:
        """Most bytes of UTF-8 that one token stands for."""
        ...

    @property
    def source(self) -> str:
        """Spec from which `open_tokenizer` opens the same tokenizer without a network."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation."""
        ...

    @property
    def unembedded_tokens(self) -> Mapping[int, str]:
        """Texts of added tokens that the model has no embedding for, by their ids."""
        ...

    @property
    def definition(self) -> str:
        """The text of its ``tokenizer.json`` without truncation and padding; empty without one."""
        ...

    @property
    def knows_grammars(self) -> bool:
        """True if tokens have texts and one ends an answer, as grammars need."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of special tokens by role, such as ``bos_token``, for the chat template."""
        ...

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Jinja sources by name, such as ``default``; empty if the model has none."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, on request with special tokens such as BOS."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a whole sequence, without special tokens."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token by itself, special tokens included; empty for unknown ids."""
        ...

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one sequence."""
        ...
