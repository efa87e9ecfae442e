"""Tokenize with a model's own tokenizer from a folder in the layout of the hub."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers.decoders import ByteLevel

from halfmoon_conductor.text.chat_template import ChatTemplate
from halfmoon_conductor.text.chat_template_files import chat_templates_of
from halfmoon_conductor.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from halfmoon_conductor.text.tokenizer_files import naming_model, read_configs
from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable
from halfmoon_conductor.text.word_cache import WordCache
from halfmoon_models.errors import one_line
from halfmoon_models.text_file_checks import MAX_TOKEN_IDS
from halfmoon_models.tokenizer.byte_alphabet import BYTE_OF
from halfmoon_models.tokenizer.embedded_tokens import embedded_definition, unembedded_tokens
from halfmoon_models.tokenizer.end_tokens import find_end_tokens
from halfmoon_models.tokenizer.tokenizer_builder import BuiltTokenizer, build_tokenizer
from halfmoon_models.tokenizer.turn_end import Render

#: Tokens whose bytes are cached: as many as the largest vocabularies have.
_REMEMBERED_TOKENS = 1 << 18
#: How vocabularies without an alphabet of bytes write a byte.
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class HubTokenizer:
    """The tokenizer of a folder, with the settings of its config files."""

    def __init__(self, folder: Path, *, spec: str = "") -> None:
        spec = spec or str(folder)
        with naming_model(spec):
            configs = read_configs(folder)
            built = build_tokenizer(folder)
            self._chat_templates = chat_templates_of(folder, configs["tokenizer_config.json"])
            self._vocab_size = _find_vocab_size(built, configs["config.json"])
            self._unembedded_tokens = unembedded_tokens(folder, built, self._vocab_size)
            render = _renderer(self._chat_templates.get("default"), built.special_tokens)
            self._eos_token_ids = tuple(find_end_tokens(folder, built, render))
        self._fast = built.fast
        self._special_tokens = built.special_tokens
        self._definition = embedded_definition(built, self._unembedded_tokens)
        self._word_cache = WordCache.open(built.definition.encode(), self._fast)
        self._special_ids = frozenset(
            token for token, added in self._fast.get_added_tokens_decoder().items() if added.special
        )
        self._source = str(folder)
        self._longest_token_bytes = self._find_longest_token()
        #: Cached, since every generated token needs it.
        self._token_bytes = lru_cache(_REMEMBERED_TOKENS)(self._read_token_bytes)

    @property
    def vocab_size(self) -> int:
        """Number of token ids: as many as the model embeds, where its config says so."""
        return self._vocab_size

    @property
    def longest_token_bytes(self) -> int:
        """Most bytes of one token, added tokens included."""
        return self._longest_token_bytes

    @property
    def source(self) -> str:
        """The folder, from which `open_tokenizer` opens the same tokenizer."""
        return self._source

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, as `halfmoon_models.tokenizer.end_tokens` finds them."""
        return self._eos_token_ids

    @property
    def unembedded_tokens(self) -> Mapping[int, str]:
        """Texts of added tokens that the model has no embedding for, by their ids."""
        return self._unembedded_tokens

    @property
    def definition(self) -> str:
        """The JSON of all tokens that the model embeds, without truncation and padding."""
        return self._definition

    @property
    def knows_grammars(self) -> bool:
        """True if there is a token that ends an answer."""
        return bool(self._eos_token_ids)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of the special tokens by role, such as ``bos_token``."""
        return self._special_tokens

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Jinja sources by name."""
        return self._chat_templates

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""
        if self._word_cache is not None:
            cached = self._word_cache.encode(text, add_special_tokens=add_special_tokens)
            if cached is not None:
                return cached
        # `encode` would hold the GIL all the while, seconds for a very long text, and stop the
        # event loop. This call releases it.
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a whole sequence, without special tokens."""
        return str(self._fast.decode(list(token_ids), skip_special_tokens=True))

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes.

        They are exact for byte-level decoders, else its vocabulary text with ``▁`` as a space.
        """
        piece = self._fast.id_to_token(token)
        if piece is None:
            return b""
        if token in self._special_ids:
            return str(piece).encode()
        if isinstance(self._fast.decoder, ByteLevel):
            return self._token_bytes(token)
        if (byte := _BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        return str(piece).replace("▁", " ").encode()

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer: exact for byte-level decoders, by a window for others."""
        if isinstance(self._fast.decoder, ByteLevel):
            return ByteDetokenizer(self._token_bytes)
        return WindowDetokenizer(self.decode, self._special_ids)

    def _read_token_bytes(self, token: int) -> bytes:
        piece = None if token in self._special_ids else self._fast.id_to_token(token)
        if piece is None:
            return b""
        try:
            return bytes([BYTE_OF[character] for character in piece])
        except KeyError:  # an added token stands for its own text
            return str(piece).encode()

    def _find_longest_token(self) -> int:
        """Return the bytes of the longest token. Byte-level tokens have a character per byte."""
        is_byte_level = isinstance(self._fast.decoder, ByteLevel)
        added = [token.content for token in self._fast.get_added_tokens_decoder().values()]
        longest = max((len(token.encode()) for token in added), default=1)
        pieces = self._fast.get_vocab(with_added_tokens=False)
        measure = len if is_byte_level else (lambda piece: len(piece.encode()))
        return max(longest, *map(measure, pieces), 1)


def _find_vocab_size(built: BuiltTokenizer, config: Mapping[str, Any]) -> int:
    embedded = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if embedded and (type(embedded) is not int or not 0 < embedded <= MAX_TOKEN_IDS):
        raise ValueError(f"config.json: vocab_size is {one_line(embedded, 60)}")
    return int(embedded or max(built.fast.get_vocab().values(), default=-1) + 1)


def _renderer(template: str | None, special_tokens: Mapping[str, str]) -> Render | None:
    """Return what writes a conversation without the start of an answer; None without a template."""
    try:
        rendered = ChatTemplate(template, special_tokens) if template else None
    except TokenizerUnavailable:  # said where chats need it
        return None
    if rendered is None:
        return None
    return lambda messages: rendered.render(messages, add_generation_prompt=False)
