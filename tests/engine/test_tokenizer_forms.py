"""The tokenizer that is built from a folder, and transformers' of the same folder, in all forms."""

import base64
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import AutoTokenizer

from halfmoon_models.errors import ModelError
from halfmoon_models.tokenizer.byte_alphabet import BYTE_OF
from halfmoon_models.tokenizer.tokenizer_builder import build_tokenizer
from halfmoon_testing.models.byte_tokenizer import train_tokenizer

_TEXTS = [
    "The moon is half full, isn't it?  It's 1984 o'clock: x_1 = [0.5, 'a'];\n\n\tdef f(x):\n",
    "naïve Ünïcode e\u0301 \u212b half moon 半月 がギ 한글 עברית العربية हिन्दी ไทย 🌙👩\u200d🚀",
    "<|new|> x<|new|>y <|new|>z  <|named|>  a<|word|>b <|word|> <image> x <|im_end|>\nx",
    "  leading, trailing  ",
    "UPPER <|NEW|> Lower <s> x </s> <|endoftext|>",
]
_WORDS = ("the", "half", "moon", "is", "full", "of", "12", "seas", "and", "it's", "x = [1];")


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer and no other file."""
    folder = tmp_path_factory.mktemp("bytes")
    train_tokenizer([*_TEXTS, " ".join(_WORDS)] * 3, 400).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def folder(byte_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(byte_folder, tmp_path / "model"))


LLAMA = {"model_type": "llama"}


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    write(folder, "tokenizer.json", content)


def assert_equal(folder: Path) -> None:
    """Compare ids, vocabulary, added tokens with their flags, and roles."""
    theirs: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours = build_tokenizer(folder)
    for text in _TEXTS:
        for adds in (False, True):
            expected = theirs(text, add_special_tokens=adds)["input_ids"]
            assert ours.fast.encode(text, add_special_tokens=adds).ids == expected, text
    assert ours.fast.get_vocab() == theirs.get_vocab()
    flags = {i: repr(t) for i, t in ours.fast.get_added_tokens_decoder().items()}
    assert flags == {i: repr(t) for i, t in theirs.added_tokens_decoder.items()}
    assert ours.special_tokens == theirs.special_tokens_map


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": content, **plain, **flags}


def typed(content: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", **token(content, **flags)}


def config(**content: Any) -> dict[str, Any]:
    return {"tokenizer_config.json": content}


def token_map(**content: Any) -> dict[str, Any]:
    return {"special_tokens_map.json": content}


def added(**tokens: int) -> dict[str, Any]:
    return {"added_tokens.json": {f"<|{name}|>": index for name, index in tokens.items()}}


_DECODER = {
    "0": token("<|endoftext|>", special=True),
    "900": token("<|new|>", special=True),
    "901": token("<|named|>", lstrip=True, rstrip=True),
    "902": token("<|word|>", single_word=True, normalized=True),
}
_OTHER_FLAGS = {"2": token("<|im_end|>", rstrip=True, special=False)}
_ENDS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
_VAINLY = {"add_bos_token": True, "add_eos_token": True, "add_prefix_space": True}
_ROLES = {"eos_token": typed("</s>", lstrip=True, special=True), "unk_token": None}
_TWO = ["<|new|>", "<|named|>"]
_MIXED = [{"content": "<|new|>", "lstrip": True}, "<|word|>"]
_IMAGE = {"image_token": "<image>"}
#: Files of folders whose tokens stand outside of tokenizer.json.
_SMALL_FILES: dict[str, dict[str, Any]] = {
    "decoder": config(added_tokens_decoder=_DECODER),
    "additional list": config(additional_special_tokens=_TWO),
    "additional typed": config(additional_special_tokens=[typed("<|new|>", rstrip=True)]),
    "extra list": config(extra_special_tokens=["<|new|>", typed("<|word|>", single_word=True)]),
    "extra by role": config(extra_special_tokens={**_IMAGE, "new_token": "<|new|>"}),
    "extra by role beside additional": config(
        extra_special_tokens=_IMAGE, additional_special_tokens=["<|new|>"]
    ),
    "roles of its own": config(**_IMAGE, eos_token="<|im_end|>"),
    "roles": config(bos_token="<s>", **_ROLES, pad_token="<|new|>"),
    "added file": added(named=401, new=400),
    "added file with roles": {
        **added(named=401, new=400, im_end=2),
        **token_map(eos_token="<|im_end|>", pad_token="<|new|>"),
    },
    "map": token_map(
        bos_token="<s>", eos_token=token("</s>", lstrip=True), additional_special_tokens=_TWO
    ),
    "map of objects": {
        **token_map(extra_special_tokens=_MIXED),
        **config(extra_special_tokens=["<|named|>"]),
    },
    "map by role": token_map(extra_special_tokens=_IMAGE),
    "map that a decoder hides": {
        **token_map(pad_token="<|named|>"),
        **config(added_tokens_decoder={"400": token("<|new|>")}),
    },
    "other flags than in tokenizer.json": config(
        added_tokens_decoder=_OTHER_FLAGS, eos_token="<|im_end|>"
    ),
    "ends asked for in vain": config(**_ENDS, **_VAINLY),
    "special tokens split": config(split_special_tokens=True),
}


@pytest.mark.parametrize("name", _SMALL_FILES)
@pytest.mark.parametrize("class_name", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_tokens_of_small_files_are_transformers(folder: Path, name: str, class_name: str) -> None:
    write(folder, "config.json", LLAMA)
    for file, content in _SMALL_FILES[name].items():
        write(folder, file, content)
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    write(folder, "tokenizer_config.json", {**content, "tokenizer_class": class_name})
    assert_equal(folder)


def _llama2(content: dict[str, Any]) -> None:
    """A vocabulary with byte tokens, and the normalizer of old conversions."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({"▁", *"".join(_WORDS)})
    merges = [("▁", letter) for letter in letters if letter != "▁"] + [("▁t", "h"), ("▁th", "e")]
    vocab = {p: i for i, p in enumerate([*pieces, *letters, *(a + b for a, b in merges)])}
    made = Tokenizer(BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    content.clear()
    content.update(json.loads(made.to_str()))


@pytest.mark.parametrize(
    ("model_type", "class_name", "more"),
    [
        *(
            (kind, "LlamaTokenizer", {"add_prefix_space": prefix, "legacy": legacy})
            for kind, prefix, legacy in (
                ("llama", None, None), ("llama", True, True), ("llama", True, False),
                ("llama", False, True), ("mistral", None, None), ("phi3", False, None),
            )
        ),
        *(
            ("llama", name, {})
            for name in (
                "GemmaTokenizer", "GemmaTokenizerFast", "CodeLlamaTokenizer", "LlamaTokenizerFast",
                "Unknown",
            )
        ),
    ],
)  # fmt: skip
def test_a_tokenizer_of_byte_tokens_prefixes_spaces_as_transformers_does(
    folder: Path, model_type: str, class_name: str, more: dict[str, Any]
) -> None:
    edit(folder, _llama2)
    write(folder, "config.json", {"model_type": model_type})
    write(folder, "tokenizer_config.json", {"tokenizer_class": class_name, **more})
    assert_equal(folder)


@pytest.mark.parametrize(
    ("model_type", "class_name"),
    [
        ("llama", "PreTrainedTokenizerFast"), ("llama", "LlamaTokenizer"),
        ("llama", "BloomTokenizerFast"), ("qwen2", "LlamaTokenizer"), ("qwen3", "Qwen2Tokenizer"),
        ("qwen3", "Qwen2TokenizerFast"), ("qwen3", "PreTrainedTokenizerFast"),
        ("qwen3_5_text", "Qwen2Tokenizer"), ("qwen3_5_text", "Qwen3_5Tokenizer"),
        ("gpt2", "GPT2Tokenizer"), ("gpt2", ""), ("phi", "CodeGenTokenizer"),
        ("gpt_neox", "GPTNeoXTokenizer"), ("gpt_neox", ""), ("cohere", "CohereTokenizerFast"),
        ("olmo2", "GPT2Tokenizer"), ("starcoder2", ""), ("glm4", "ChatGLM4Tokenizer"),
        ("minimax_m2", "GPT2Tokenizer"), ("gpt_oss", "PreTrainedTokenizerFast"), ("gpt_oss", ""),
        ("smollm3", "TokenizersBackend"),
    ],
)  # fmt: skip
def test_the_class_decides_about_words(folder: Path, model_type: str, class_name: str) -> None:
    def strange(content: dict[str, Any]) -> None:
        content["normalizer"] = {"type": "Lowercase"}
        content["pre_tokenizer"]["add_prefix_space"] = True

    edit(folder, strange)
    write(folder, "config.json", {"model_type": model_type})
    config = {"add_prefix_space": True, "eos_token": "<|im_end|>", "added_tokens_decoder": {}}
    named = {"tokenizer_class": class_name} if class_name else {}
    write(folder, "tokenizer_config.json", {**config, **named})
    assert_equal(folder)


@pytest.mark.parametrize("class_name", ["Qwen2Tokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer"])
@pytest.mark.parametrize("ends", [{}, {"add_bos_token": True}, {"add_eos_token": True}])
def test_vocabulary_and_merges_do(folder: Path, class_name: str, ends: Mapping[str, Any]) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    write(folder, "vocab.json", model["vocab"])
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    write(folder, "merges.txt", f"#version: 0.2\n{merges}")
    write(folder, "config.json", LLAMA)
    config = {"tokenizer_class": class_name, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    write(folder, "tokenizer_config.json", {**config, **ends})
    write(folder, "added_tokens.json", {"<|new|>": 400})
    assert_equal(folder)


def tekken(folder: Path) -> dict[str, Any]:
    """A tekken.json with the words of the folder's tokenizer."""
    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = [piece for piece, _ in sorted(fast.get_vocab().items(), key=lambda each: each[1])]
    ordinary = [bytes(BYTE_OF[c] for c in p) for p in pieces if not p.startswith("<|")]
    ordinary.sort(key=lambda each: len(each) > 1)
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    return {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
            "num_vocab_tokens": len(ordinary),
            "default_vocab_size": len(ordinary) + 10 - 3,
            "default_num_special_tokens": 10,
            "version": "v11",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(each).decode(), "token_str": None}
            for rank, each in enumerate(ordinary)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(special)
        ],
    }


def test_mistrals_own_file_is_read(folder: Path) -> None:
    write(folder, "tekken.json", tekken(folder))
    (folder / "tokenizer.json").unlink()
    write(folder, "config.json", {"model_type": "mistral3"})
    assert_equal(folder)
    ids = build_tokenizer(folder).fast.encode("[INST]half moon[/INST]").ids
    assert (ids[0], ids[-1]) == (3, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"special_tokens": None}, "no special_tokens"),
        ({"special_tokens": [{"rank": 7, "token_str": "x"}]}, "ranks"),
        ({"vocab": [{"token_bytes": "?"}]}, "not a Tekken tokenizer"),
        ({"vocab": 5}, "not a Tekken tokenizer"),
        ({"config": {}}, "not a Tekken tokenizer"),
        ({"config": {"pattern": "(", "default_vocab_size": 12}}, "tekken|unusable"),
    ],
)
def test_a_damaged_tekken_file_is_named(folder: Path, change: dict[str, Any], words: str) -> None:
    write(folder, "tekken.json", {**tekken(folder), **change})
    (folder / "tokenizer.json").unlink()
    write(folder, "config.json", {"model_type": "mistral3"})
    with pytest.raises(ModelError, match=words):
        build_tokenizer(folder)


@pytest.mark.parametrize("is_sequence", [True, False])
@pytest.mark.parametrize("release", ["4.57.1", "5.0.0", None])
def test_mistrals_regex_is_mended_where_the_config_asks(
    tmp_path: Path, release: str | None, is_sequence: bool
) -> None:
    alphabet = {text: index for index, text in enumerate(BYTE_OF)}
    vocab = alphabet | {f"{index}~": index for index in range(256, 100_300)}
    made = Tokenizer(BPE(vocab, []))
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([as_bytes]) if is_sequence else as_bytes
    made.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "config.json", {"model_type": "mistral", "transformers_version": release})
    write(tmp_path, "tokenizer_config.json", {"fix_mistral_regex": True})
    assert_equal(tmp_path)


WRONG: list[Any] = [{"x": {}}, {"1": 5}, {"1": {"content": 5}}, []]


@pytest.mark.parametrize(
    "files",
    [
        *(config(added_tokens_decoder=wrong) for wrong in WRONG),
        *(config(extra_special_tokens=wrong) for wrong in (5, [5], {"x_token": 5})),
        config(eos_token=5),
        config(additional_special_tokens="x"),
        {"added_tokens.json": {"x": "y"}},
        token_map(eos_token={}),
    ],
)
def test_what_is_no_token_is_named_with_its_folder(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        write(folder, name, content)
    with pytest.raises(ModelError, match="model is unusable"):
        build_tokenizer(folder)


def test_a_further_tokenizer_file_elsewhere_is_refused(folder: Path) -> None:
    listed = ["tokenizer./../../secret.json"]
    write(folder, "tokenizer_config.json", {"fast_tokenizer_files": listed})
    with pytest.raises(ModelError, match="a file of the same folder is wanted"):
        build_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tiktoken.model"])
def test_a_tokenizer_of_a_kind_that_is_not_read_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, "config.json", LLAMA)
    write(tmp_path, name, {})
    with pytest.raises(ModelError, match=rf"its {name} is .*save_pretrained"):
        build_tokenizer(tmp_path)
