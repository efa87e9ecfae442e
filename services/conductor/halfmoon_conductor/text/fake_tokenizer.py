"""Tokenize for the fake engine, which needs no files."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from urllib.parse import parse_qsl, urlsplit

from halfmoon_conductor.text.detokenizer import ByteDetokenizer, Detokenizer
from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable


class FakeTokenizer:
    """Tokenize for the fake engine: one token per byte of UTF-8, decoded as one word per token.

    Encoding and decoding are not inverse, as the fake model's tokens have no meaning:
    ``encode("a")`` is [97] and ``decode([97])`` is " t97".
    """

    #: One line per message, and the start of the assistant's line.
    chat_templates: Mapping[str, str] = MappingProxyType(
        {
            "default": "{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
            "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
        }
    )

    #: The fake engine's tokens have no texts.
    definition = ""
    knows_grammars = False

    def __init__(self, vocab_size: int = 997, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.special_tokens: Mapping[str, str] = {}
        self.unembedded_tokens: Mapping[int, str] = {}
        self.longest_token_bytes = 1
        self.source = f"fake://tokenizer?vocab={vocab_size}&eos={max((-1, *eos_token_ids))}"

    @classmethod
    def from_spec(cls, spec: str) -> "FakeTokenizer":
        """Read `vocab` and `eos` of ``fake://tiny?vocab=997&eos=-1``, and nothing else.

        Raises:
            TokenizerUnavailable: one of them is not a number, or `vocab` is not positive.
        """
        query = dict(parse_qsl(urlsplit(spec).query))
        try:
            vocab_size, eos = int(query.get("vocab", 997)), int(query.get("eos", -1))
        except ValueError as error:
            raise TokenizerUnavailable(f"{spec}: {error}") from None
        if vocab_size < 1:
            raise TokenizerUnavailable(f"{spec}: vocab is {vocab_size}, must be at least 1")
        return cls(vocab_size, (eos,) if eos >= 0 else ())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return one token per byte; there are no special tokens."""
        return [byte % self.vocab_size for byte in text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return one word per token."""
        return "".join(f" t{token}" for token in token_ids)

    def token_bytes(self, token: int) -> bytes:
        """Return the token's word."""
        return f" t{token}".encode()

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer that writes each token's word."""
        return ByteDetokenizer(self.token_bytes)
