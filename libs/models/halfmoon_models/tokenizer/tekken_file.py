"""Read ``tekken.json``, in which Mistral publishes its tokenizers.

The file lists tokens by their bytes in the order of their ranks. A byte-level BPE over them has a
merge for each way to make a token of two tokens, the earliest tokens first.
"""

import base64
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from halfmoon_models.errors import BrokenCheckpoint, ModelError, UnsupportedModel, one_line
from halfmoon_models.tokenizer.byte_alphabet import BYTE_TEXTS

TEKKEN_FILE = "tekken.json"
#: Work for all tokens: for each, the square of its bytes. Real files take about 10 million.
_MAX_WORK = 1 << 28


def tokenizer_of_tekken(content: Mapping[str, Any], place: str) -> Tokenizer:
    """Return the tokenizer that a file describes.

    Args:
        content: of the file.
        place: names the file in errors.

    Raises:
        UnsupportedModel: it is of the older form, without special tokens.
        BrokenCheckpoint: it holds something else.
    """
    try:
        special = _special_tokens(content, place)
        vocab, merges = _vocabulary(_ordinary_tokens(content, len(special)), len(special))
        vocab |= {text: rank for rank, text in enumerate(special)}
        made = Tokenizer(BPE(vocab, merges, fuse_unk=False, ignore_merges=True))
        words = pre_tokenizers.Split(Regex(content["config"]["pattern"]), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    except ModelError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise BrokenCheckpoint(
            f"{place} is not a Tekken tokenizer ({one_line(error, 120)}); fetch the file once more"
        ) from None
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in special])
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made


def _special_tokens(content: Mapping[str, Any], place: str) -> list[str]:
    """Return the texts of the special tokens; their places are their ids."""
    entries = content.get("special_tokens")
    if entries is None:
        raise UnsupportedModel(
            f"{place} has no special_tokens, as files of 2024: put the tokenizer.json of the same "
            "model beside it, or save the tokenizer with mistral-common and transformers"
        )
    by_rank = {entry["rank"]: entry["token_str"] for entry in entries}
    if sorted(by_rank) != list(range(len(entries))) or not all(
        isinstance(text, str) for text in by_rank.values()
    ):
        raise ValueError("the ranks of its special tokens are not 0, 1, 2, …")
    n_special = content["config"].get("default_num_special_tokens")
    n_special = len(entries) if n_special is None else n_special
    if type(n_special) is not int or not len(entries) <= n_special <= 1 << 20:
        raise ValueError(f"default_num_special_tokens is {one_line(n_special, 40)}")
    return [by_rank.get(rank, f"<SPECIAL_{rank}>") for rank in range(n_special)]


def _ordinary_tokens(content: Mapping[str, Any], n_special: int) -> list[bytes]:
    entries, size = content["vocab"], content["config"].get("default_vocab_size")
    if size is not None:
        if type(size) is not int or size < n_special:
            raise ValueError(f"default_vocab_size is {one_line(size, 40)}")
        entries = entries[: size - n_special]
    tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
    if sum(len(each) ** 2 for each in tokens) > _MAX_WORK:
        raise ValueError("its tokens are far longer than words")
    return tokens


def _vocabulary(tokens: list[bytes], first_id: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for token in ranks:
        halves = ((token[:n], token[n:]) for n in range(1, len(token)))
        pairs = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(_text(left), _text(right)) for left, right in pairs]
    return {_text(token): first_id + rank for token, rank in ranks.items()}, merges


def _text(token: bytes) -> str:
    return "".join([BYTE_TEXTS[byte] for byte in token])
