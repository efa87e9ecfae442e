"""Define what the conductor needs of a tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from halfmoon_conductor.text.detokenizer import Detokenizer


class TokenizerUnavailable(Exception):
    """No tokenizer could be made from this model spec: the text says what is missing."""


class Tokenizer(Protocol):
    """What the front needs of a tokenizer. Its methods may be called from any thread."""

    @property
    def vocab_size(self) -> int:
        """Token ids are less than this."""
        ...

    @property
    def longest_token_bytes(self) -> int:
        """Bytes of UTF-8 that one token stands for at the most."""
        ...

    @property
    def source(self) -> str:
        """What `open_tokenizer` makes the same one of, without a network."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation."""
        ...

    @property
    def definition(self) -> str:
        """The text of its ``tokenizer.json``, without cutting and padding; empty: none."""
        ...

    @property
    def knows_grammars(self) -> bool:
        """Whether tokens have texts and one ends an answer, as a grammar needs it."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of the tokens with a role, such as ``bos_token``, for the chat template."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Jinja source; None for a model that is not for chats."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; with what the model wants around it, such as a first BOS."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence, special tokens left out."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for by itself, special ones included; none for an unknown one."""
        ...

    def detokenizer(self) -> Detokenizer:
        """For one sequence, token by token."""
        ...
