"""Tokenize with a model's own tokenizer from a folder in the layout of the hub."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Fast
from tokenizers.decoders import ByteLevel

from halfmoon_conductor.text.chat_template_files import chat_templates_of
from halfmoon_conductor.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from halfmoon_conductor.text.tokenizer_files import (
    naming_model,
    read_configs,
    special_tokens_of,
)
from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable
from halfmoon_conductor.text.word_cache import WordCache
from halfmoon_models.bounded_files import read_text
from halfmoon_models.errors import one_line
from halfmoon_models.text_file_checks import (
    MAX_TOKEN_IDS,
    MAX_TOKENIZER_BYTES,
)

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
            content = read_text(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)
        try:
            self._fast = Fast.from_str(content)
        except BaseException as error:  # the library raises bare Exception, and panics
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise TokenizerUnavailable(
                f"tokenizer.json of {spec} is unusable: {one_line(error, 300)}; fetch the file "
                "once more, or save it again with transformers' AutoTokenizer"
            ) from None
        # A tokenizer.json may ask for truncation or padding, as in training; never for serving.
        self._fast.no_truncation()
        self._fast.no_padding()
        self._word_cache = WordCache.open(content.encode(), self._fast)
        with naming_model(spec):
            self._special_tokens = special_tokens_of(configs)
            self._chat_templates = chat_templates_of(folder, configs["tokenizer_config.json"])
            self._eos_token_ids = self._find_eos(configs)
            self._vocab_size = self._find_vocab_size(configs["config.json"])
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
        """End-of-text tokens.

        They are those of the generation config, else the config, else the tokenizer's config.
        """
        return self._eos_token_ids

    @property
    def definition(self) -> str:
        """The tokenizer's JSON without truncation and padding."""
        return str(self._fast.to_str())

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
            return bytes([_BYTE_OF[character] for character in piece])
        except KeyError:  # an added token stands for its own text
            return str(piece).encode()

    def _find_eos(self, configs: Mapping[str, dict[str, Any]]) -> tuple[int, ...]:
        config = configs["config.json"]
        for source in (configs["generation_config.json"], config, config.get("text_config", {})):
            if (found := source.get("eos_token_id")) is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
        eos = self._fast.token_to_id(self._special_tokens.get("eos_token", ""))
        return () if eos is None else (eos,)

    def _find_longest_token(self) -> int:
        """Return the bytes of the longest token. Byte-level tokens have a character per byte."""
        is_byte_level = isinstance(self._fast.decoder, ByteLevel)
        added = [token.content for token in self._fast.get_added_tokens_decoder().values()]
        longest = max((len(token.encode()) for token in added), default=1)
        pieces = self._fast.get_vocab(with_added_tokens=False)
        measure = len if is_byte_level else (lambda piece: len(piece.encode()))
        return max(longest, *map(measure, pieces), 1)

    def _find_vocab_size(self, config: dict[str, Any]) -> int:
        embedded = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        if embedded and (type(embedded) is not int or not 0 < embedded <= MAX_TOKEN_IDS):
            raise ValueError(f"config.json: vocab_size is {one_line(embedded, 60)}")
        return int(embedded or max(self._fast.get_vocab().values(), default=-1) + 1)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of byte-level BPE.

    Printable Latin-1 characters stand for themselves. The other bytes, in order, are the characters
    from U+0100 on (GPT-2's alphabet, which all byte-level tokenizers keep).
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()
