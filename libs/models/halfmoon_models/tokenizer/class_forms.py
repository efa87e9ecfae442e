"""Describe what transformers makes anew for a class of tokenizers, as in ``tokenizer.json``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
#: As that of Qwen 2, with marks as parts of words.
_QWEN3_5_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_BYTES: Mapping[str, Any] = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
}  # fmt: skip
_SPACE_MARK = "▁"
_NFC = {"type": "NFC"}


@dataclass(frozen=True)
class ClassForm:
    """Describe what a class makes anew around a vocabulary and its merges."""

    #: Returns normalizer, pre-tokenizer and decoder, from `tokenizer_config.json`.
    parts: Callable[[Mapping[str, Any]], tuple[Any, Any, Any]]
    #: Flags of the BPE model that are not the library's defaults.
    model: Mapping[str, Any] = field(default_factory=dict)
    #: Special tokens by role where no file names another.
    tokens: Mapping[str, str] = field(default_factory=dict)
    #: The same for roles that only this class has.
    own_tokens: Mapping[str, str] = field(default_factory=dict)
    #: Whether ``vocab.json`` and ``merges.txt`` are read where there is no ``tokenizer.json``.
    reads_vocabulary: bool = False
    #: What happens to special tokens once all are added.
    afterwards: Literal["", "mark", "mark_with_flags"] = ""
    #: Whether BOS and EOS are written as the config says, whatever ``tokenizer.json`` says.
    resets_template: bool = False
    #: Whether BOS is written where the config does not say.
    adds_bos: bool = False


def _byte_decoder() -> dict[str, Any]:
    return {**_BYTES, "add_prefix_space": True}


def _split_by(words: str) -> Callable[[Mapping[str, Any]], tuple[Any, Any, Any]]:
    def parts(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        split = {
            "type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False,
        }  # fmt: skip
        as_bytes = {**_BYTES, "add_prefix_space": _prefix(config, False), "use_regex": False}
        return _NFC, {"type": "Sequence", "pretokenizers": [split, as_bytes]}, _byte_decoder()

    return parts


def _byte_level(normalizer: Any) -> Callable[[Mapping[str, Any]], tuple[Any, Any, Any]]:
    def parts(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        as_bytes = {**_BYTES, "add_prefix_space": _prefix(config, False)}
        return normalizer, as_bytes, _byte_decoder()

    return parts


def _cohere(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    as_bytes = {**_BYTES, "add_prefix_space": _prefix(config, False)}
    digits = {"type": "Digits", "individual_digits": True}
    return _NFC, {"type": "Sequence", "pretokenizers": [digits, as_bytes]}, as_bytes


def _gemma(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    del config
    normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE_MARK}
    split = {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
        "invert": False,
    }  # fmt: skip
    return normalizer, split, {"type": "Sequence", "decoders": _fallback_decoders()}


def _llama(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    prefix = _prefix(config, True)
    scheme = "always" if config.get("legacy", False) else "first"
    metaspace = {
        "type": "Metaspace", "replacement": _SPACE_MARK, "split": False,
        "prepend_scheme": scheme if prefix else "never",
    }  # fmt: skip
    decoders = _fallback_decoders()
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return None, metaspace, {"type": "Sequence", "decoders": decoders}


def _code_llama(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    _, metaspace, _ = _llama({"add_prefix_space": _prefix(config, True)})
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return None, metaspace, {"type": "Sequence", "decoders": [*_fallback_decoders(), strip]}


def _fallback_decoders() -> list[dict[str, Any]]:
    mark = {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "}
    return [mark, {"type": "ByteFallback"}, {"type": "Fuse"}]


def _prefix(config: Mapping[str, Any], default: bool) -> bool:
    given = config.get("add_prefix_space")
    return default if given is None else bool(given)


_END_OF_TEXT = "<|endoftext|>"
_EMPTY_AFFIXES = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
_QWEN_TOKENS = {"unk_token": _END_OF_TEXT, "eos_token": _END_OF_TEXT, "pad_token": _END_OF_TEXT}
_LLAMA_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_GPT_TOKENS = {"unk_token": _END_OF_TEXT, "bos_token": _END_OF_TEXT, "eos_token": _END_OF_TEXT}

CLASS_FORMS: Mapping[str, ClassForm] = {
    "Qwen2Tokenizer": ClassForm(
        _split_by(_QWEN2_WORDS),
        _EMPTY_AFFIXES,
        _QWEN_TOKENS,
        reads_vocabulary=True,
        afterwards="mark",
    ),
    "Qwen3_5Tokenizer": ClassForm(_split_by(_QWEN3_5_WORDS), _EMPTY_AFFIXES, _QWEN_TOKENS),
    "GPT2Tokenizer": ClassForm(
        _byte_level(None), _EMPTY_AFFIXES, _GPT_TOKENS, reads_vocabulary=True
    ),
    "CodeGenTokenizer": ClassForm(
        _byte_level(None), _EMPTY_AFFIXES, _GPT_TOKENS, reads_vocabulary=True
    ),
    "GPTNeoXTokenizer": ClassForm(
        _byte_level(_NFC),
        _EMPTY_AFFIXES,
        {**_GPT_TOKENS, "pad_token": "<|padding|>"},
        reads_vocabulary=True,
        resets_template=True,
    ),
    "CohereTokenizer": ClassForm(
        _cohere,
        _EMPTY_AFFIXES,
        {
            "unk_token": "<UNK>",
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "sep_token": "<SEP>",
            "mask_token": "<MASK_TOKEN>",
        },
        reads_vocabulary=True,
        afterwards="mark_with_flags",
    ),
    "GemmaTokenizer": ClassForm(
        _gemma,
        {"fuse_unk": True, "byte_fallback": True, "unk_token": "<unk>"},
        {
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
    "LlamaTokenizer": ClassForm(_llama, {"fuse_unk": True, "byte_fallback": True}, _LLAMA_TOKENS),
    "CodeLlamaTokenizer": ClassForm(
        _code_llama,
        {"fuse_unk": True, "byte_fallback": True, "unk_token": "<unk>"},
        _LLAMA_TOKENS,
        {
            "prefix_token": "▁<PRE>",
            "middle_token": "▁<MID>",
            "suffix_token": "▁<SUF>",
            "eot_token": "▁<EOT>",
            "fill_token": "<FILL_ME>",
        },
        resets_template=True,
        adds_bos=True,
    ),
}
