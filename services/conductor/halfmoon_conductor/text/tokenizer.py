"""Texts into token ids and back: the model's own tokenizer, without transformers or torch.

`open_tokenizer` takes the same model spec as the workers: a local folder, a hub id (of which
only the tokenizer's files are fetched), or ``fake://…``, which needs no file at all.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

import huggingface_hub
from tokenizers import Tokenizer as Fast
from tokenizers.decoders import ByteLevel

from halfmoon_conductor.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from halfmoon_conductor.text.word_cache import WordCache
from halfmoon_models.bounded_files import list_files, read_json_object, read_text
from halfmoon_models.errors import ModelError, ModelNotFound, one_line
from halfmoon_models.foreign_formats import check_file_names
from halfmoon_models.model_location import local_folder
from halfmoon_models.text_file_checks import (
    MAX_SMALL_BYTES,
    MAX_TOKEN_IDS,
    MAX_TOKENIZER_BYTES,
    check_text_files,
)

#: All that is read of a model; its weights are the workers' matter.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)


#: How vocabularies without an alphabet of bytes write one.
#: As many as the largest vocabularies have.
_REMEMBERED_TOKENS = 1 << 18
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


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


def open_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of a model. Reads files, and may fetch them: not for the event loop.

    Raises:
        TokenizerUnavailable: no such folder or hub id, or no ``tokenizer.json`` in it.
    """
    if spec.startswith("fake://"):
        return FakeTokenizer.from_spec(spec)
    with _naming(spec):
        folder = local_folder(spec)
    return HubTokenizer(_fetch(spec) if folder is None else folder, spec=spec)


class HubTokenizer:
    """The tokenizer in a folder in the hub's layout, with what its configs say of it."""

    def __init__(self, folder: Path, *, spec: str = "") -> None:
        spec = spec or str(folder)
        with _naming(spec):
            configs = _read_configs(folder)
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
        # A tokenizer.json may say to cut or to pad, as it was trained: never for serving.
        self._fast.no_truncation()
        self._fast.no_padding()
        self._words = WordCache.open(content.encode(), self._fast)
        with _naming(spec):
            self._special_tokens = _special_tokens(configs)
            self._chat_template = _chat_template(folder, configs["tokenizer_config.json"])
            self._eos_token_ids = self._find_eos(configs)
            self._vocab_size = self._find_vocab_size(configs["config.json"])
        self._hidden = frozenset(
            token for token, added in self._fast.get_added_tokens_decoder().items() if added.special
        )
        self._source = str(folder)
        self._longest_token_bytes = self._find_longest_token()
        #: Remembered: every token that is generated asks.
        self._token_bytes = lru_cache(_REMEMBERED_TOKENS)(self._spelt)

    @property
    def vocab_size(self) -> int:
        """Token ids are less than this: what the model embeds, where its config says so."""
        return self._vocab_size

    @property
    def longest_token_bytes(self) -> int:
        """Of the vocabulary, added tokens included."""
        return self._longest_token_bytes

    @property
    def source(self) -> str:
        """The folder."""
        return self._source

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Of the generation config, else the config, else the tokenizer's config."""
        return self._eos_token_ids

    @property
    def definition(self) -> str:
        """As text, without cutting and padding."""
        return str(self._fast.to_str())

    @property
    def knows_grammars(self) -> bool:
        """Whether there is a token that ends an answer."""
        return bool(self._eos_token_ids)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Such as ``bos_token``."""
        return self._special_tokens

    @property
    def chat_template(self) -> str | None:
        """Jinja source."""
        return self._chat_template

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        if self._words is not None:
            known = self._words.encode(text, add_special_tokens=add_special_tokens)
            if known is not None:
                return known
        # `encode` would hold the interpreter's lock for as long as it takes, seconds for a
        # very long text, and stop the event loop with it; this lets go of it.
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence."""
        return str(self._fast.decode(list(token_ids), skip_special_tokens=True))

    def token_bytes(self, token: int) -> bytes:
        """Exact for byte-level decoders; else as the vocabulary writes it, ``▁`` as a space."""
        piece = self._fast.id_to_token(token)
        if piece is None:
            return b""
        if token in self._hidden:
            return str(piece).encode()
        if isinstance(self._fast.decoder, ByteLevel):
            return self._token_bytes(token)
        if (byte := _BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        return str(piece).replace("▁", " ").encode()

    def detokenizer(self) -> Detokenizer:
        """Exact for byte-level decoders, by a window for others."""
        if isinstance(self._fast.decoder, ByteLevel):
            return ByteDetokenizer(self._token_bytes)
        return WindowDetokenizer(self.decode, self._hidden)

    def _spelt(self, token: int) -> bytes:
        piece = None if token in self._hidden else self._fast.id_to_token(token)
        if piece is None:
            return b""
        try:
            return bytes([_BYTE_OF[character] for character in piece])
        except KeyError:  # an added token, written as itself
            return str(piece).encode()

    def _find_eos(self, configs: Mapping[str, dict[str, Any]]) -> tuple[int, ...]:
        config = configs["config.json"]
        for source in (configs["generation_config.json"], config, config.get("text_config", {})):
            if (found := source.get("eos_token_id")) is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
        eos = self._fast.token_to_id(self._special_tokens.get("eos_token", ""))
        return () if eos is None else (eos,)

    def _find_longest_token(self) -> int:
        """A byte-level piece has a character for each byte; other pieces are texts."""
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


class FakeTokenizer:
    """For the fake engine: a token per byte of UTF-8, and a word per token.

    Encoding and decoding are not each other's inverse, as the fake model's tokens mean
    nothing: ``encode("a")`` is [97] and ``decode([97])`` is " t97".
    """

    #: One line per message, and a line to go on with.
    chat_template: str | None = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )

    #: The fake engine's tokens are no text.
    definition = ""
    knows_grammars = False

    def __init__(self, vocab_size: int = 997, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.special_tokens: Mapping[str, str] = {}
        self.longest_token_bytes = 1
        self.source = f"fake://tokenizer?vocab={vocab_size}&eos={max((-1, *eos_token_ids))}"

    @classmethod
    def from_spec(cls, spec: str) -> "FakeTokenizer":
        """Read `vocab` and `eos` of ``fake://tiny?vocab=997&eos=-1``; the rest is the engine's.

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
        """A token per byte; there are no special tokens to add."""
        return [byte % self.vocab_size for byte in text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        """A word per token."""
        return "".join(f" t{token}" for token in token_ids)

    def token_bytes(self, token: int) -> bytes:
        """Its word."""
        return f" t{token}".encode()

    def detokenizer(self) -> Detokenizer:
        """Each token's word."""
        return ByteDetokenizer(self.token_bytes)


def _fetch(spec: str) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(spec, allow_patterns=list(FILES)))
    except Exception as error:  # a dozen kinds: no such id, no access, no network, a bad name
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TokenizerUnavailable(
            f"{spec} is not a local folder, and could not be fetched from the hub: "
            f"{one_line(first_line, 300)}"
        ) from None


@contextmanager
def _naming(spec: str) -> Iterator[None]:
    """Turn what a malformed config raises into an error that names the model."""
    try:
        yield
    except ModelError as error:
        raise TokenizerUnavailable(str(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise TokenizerUnavailable(
            f"a config file of {spec} is unusable: {one_line(error, 300)}"
        ) from None


def _read_configs(folder: Path) -> dict[str, dict[str, Any]]:
    """The JSON files beside tokenizer.json, checked; an empty object for one that is missing.

    Raises:
        ModelError: a file is damaged, or no tokenizer is there.
    """
    names = list_files(folder)
    if "tokenizer.json" not in names and "config.json" not in names:
        with suppress(ModelNotFound):  # what it is instead, if that shows
            check_file_names(folder, names)
    configs = {
        name: read_json_object(folder / name, MAX_SMALL_BYTES) if name in names else {}
        for name in FILES
        if name.endswith(".json") and name != "tokenizer.json"
    }
    check_text_files(folder, configs["config.json"], names, needs_tokenizer=True)
    return configs


def _special_tokens(configs: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Roles such as ``bos_token``; a token is written as its text or as an object with it."""
    tokens: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for role, token in configs[name].items():
            content = token.get("content") if isinstance(token, dict) else token
            if role.endswith("_token") and isinstance(content, str):
                tokens[role] = content
    return tokens


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """Of its own file, else of the config: one template, or several of which one is default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path, MAX_SMALL_BYTES)
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}.get("default")
    return template if isinstance(template, str) else None


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte, to the byte.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the
    characters from U+0100 on (GPT-2's alphabet, which all byte-level tokenizers keep).
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()
