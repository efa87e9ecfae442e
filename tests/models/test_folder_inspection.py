"""A folder that can't be served is refused in one line: what it is, by which file, the way out."""

import json
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfmoon_engine.checkpoints.model_folder import check_model, open_model_folder
from halfmoon_models import folder_inspection as folder_module
from halfmoon_models.errors import MAX_ERROR_CHARS, ModelError, ModelNotFound
from halfmoon_models.folder_inspection import inspect_folder
from halfmoon_models.model_kinds import unserved_inputs
from halfmoon_models.weight_files import INDEX_FILE, SINGLE_FILE
from halfmoon_testing.models.llama_folders import (
    LLAMA_CONFIG,
    llama_tensors,
    make_llama,
    safetensors_bytes,
    safetensors_with_header,
    split_safetensors,
    write_files,
)

BASES = safetensors_bytes(llama_tensors())
#: Other marks of quantisation than a method.
QUANTISED: list[dict[str, Any]] = [
    {"quantization_config": {"load_in_4bit": True}},
    {"quantization": {"group_size": 64, "bits": 4}},
    {"compression_config": {"format": "pack"}},
    {"quantization_config": "yes"},
    {"text_config": {"quantization_config": {"quant_method": "gptq"}}},
]


#: Formats whose refusal names a command that writes them in bfloat16.
WRITTEN_WHOLE = ("FP8", "MXFP4")


def refusal(folder: Path) -> str:
    """The line that a folder is refused with."""
    with pytest.raises(ModelError) as caught:
        check_model(str(folder))
    line = str(caught.value)
    assert "\n" not in line and line.isprintable() and len(line) <= MAX_ERROR_CHARS
    return line


def test_a_whole_model_passes(tmp_path: Path) -> None:
    found = inspect_folder(make_llama(tmp_path), needs_tokenizer=True)
    assert found.weights.n_elements == 2 * 32 * 16 + 3 * 16 + 7 * 16 * 16
    assert found.weights.n_bytes == 4 * found.weights.n_elements
    check_model(str(tmp_path))
    check_model(str(make_llama(tmp_path / "listed", configuration_files=["config.json"])))


# Places


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("/no/such/folder", "nothing is there"),
        ("no such model", "not of a hub id's form"),
        ("a/b/c", "not of a hub id's form"),
        ("x" * 5000, "not a folder"),
        ("~nobody-of-this-name/model", "not a folder"),
        ("", "names no model"),
        ("a\0b", "names no model"),
        ("fake://tiny?vocab=many", "vocab"),
    ],
)
def test_what_is_no_folder_is_named(spec: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        check_model(spec)
    assert "\n" not in str(caught.value)


def test_files_in_the_place_of_a_folder_are_named(tmp_path: Path) -> None:
    for name, words in [
        ("model.gguf", "GGUF.*converted from"),
        ("model.bin", "pickled.*save_pretrained"),
        ("model.safetensors", "not a folder but a file"),
    ]:
        (tmp_path / name).write_bytes(b"GGUF")
        assert re.search(words, refusal(tmp_path / name))


def test_a_hub_id_that_can_not_be_fetched_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: object, **__: object) -> str:
        raise OSError("\n\nno connection\nsecond line \x1b[31m")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelNotFound, match=r"can't be fetched: no connection$"):
        check_model("someone/some-model")


def test_no_weights_of_a_refused_id_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[list[str]] = []
    make_llama(tmp_path, model_type="bert")

    def fetch(hub_id: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(ModelError, match="encoder"):
        open_model_folder("someone/bert")
    assert not any("safetensors" in pattern for patterns in asked for pattern in patterns)


# Formats


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "is empty"),
        ({"readme__md": "hello"}, r"no config\.json"),
        ({"tokenizer__json": {}}, r"no config\.json, only a tokenizer"),
        ({"model-Q4_K_M__gguf": b"GGUF"}, "GGUF.*Q4_K_M.*converted from"),
        ({"config__json": LLAMA_CONFIG, "pytorch_model__bin": b"\x80"}, "nothing is unpickled"),
        ({"params__json": {}, "consolidated__safetensors": BASES}, "author's own format"),
        ({"params__json": {}, "consolidated.00__pth": b""}, "pickled"),
        ({"config__json": LLAMA_CONFIG, "tf_model__h5": b""}, "TensorFlow"),
        ({"config__json": LLAMA_CONFIG, "flax_model__msgpack": b""}, "Flax"),
        ({"config__json": LLAMA_CONFIG, "model__onnx": b""}, "ONNX"),
        ({"config__json": LLAMA_CONFIG, "weights__npz": b""}, "MLX"),
        ({"model_index__json": {}}, "diffusers"),
        ({"modules__json": "[]", "config__json": LLAMA_CONFIG}, "sentence-transformers"),
        (
            {"adapter_config__json": {"base_model_name_or_path": "me/base"}},
            "adapter.*'me/base'.*merge",
        ),
        ({"adapter_config__json": {"base_model_name_or_path": "a\n\x1b[1mb"}}, r"'a \\+x1b"),
        ({"adapter_config__json": "{", "adapter_model__bin": b""}, "its base model"),
        ({"adapter_model__safetensors": BASES}, "adapter"),
        ({"config__json": LLAMA_CONFIG}, r"lacks model\.safetensors"),
        ({"config__json": "{"}, "not valid JSON"),
        ({"config__json": "[]"}, "JSON list"),
        ({"config__json": b"\xff\xfe"}, "not UTF-8"),
        ({"config__json": "[" * 200_000}, "levels deep"),
        ({"config__json": '{"a":' * 200 + "1" + "}" * 200}, "levels deep"),
        ({"config__json": '{"a": ' + "9" * 5000 + "}"}, "not valid JSON"),
        ({"config__json": " " * (5 << 20)}, "larger than 4 MiB"),
    ],
)
def test_other_kinds_of_folders_are_named(
    files: dict[str, Any], words: str, tmp_path: Path
) -> None:
    line = refusal(write_files(tmp_path, **files))
    assert re.search(words, line), line


# Kinds of models


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None}, "no model_type"),
        *[
            ({"model_type": kind}, "encoder, which reads")
            for kind in ("bert", "modernbert", "xlm-roberta")
        ],
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "vit"}, "model of images"),
        ({"model_type": "whisper"}, "model of sounds"),
        ({"model_type": "mamba"}, "linear_attention"),
        ({"model_type": "rwkv"}, "recurrent state"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "sorts texts into classes"),
        ({"architectures": ["LlamaForTokenClassification"]}, "sorts words"),
        ({"architectures": ["Qwen2ForRewardModel"]}, "reward model"),
        ({"architectures": ["MistralModel"]}, "no head to write with"),
        ({"architectures": ["NewForMaskedLM"]}, "fills gaps"),
        ({"use_bidirectional_attention": True}, "later tokens"),
        (
            {"configuration_files": ["config.4.0.0.json"]},
            "configuration_files in config.json leads to ",
        ),
        ({"configuration_files": [1]}, "configuration_files in config.json leads to "),
        (
            {"configuration_files": "config.4.0.0.json"},
            "configuration_files in config.json leads to ",
        ),
        ({"configuration_files": {}}, "configuration_files in config.json leads to "),
        ({"is_causal": False}, "later tokens"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic rotary"),
        ({"text_config": {"_attn_implementation_internal": "a/b:c"}}, "never run"),
        *((marks, "is quantised") for marks in QUANTISED),
        # Absurd numbers.
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 9000}, "num_hidden_layers is 9000, the files hold only 12 tensors"),
        ({"num_hidden_layers": "1"}, "num_hidden_layers is 1, a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": 17}, "hidden_size is 17, a multiple"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"num_attention_heads": -4}, "num_attention_heads is -4"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"head_dim": 10**6}, "head_dim"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_parameters.rope_theta is inf"),
        ({"anything": 10**4000}, "anything is 10.30 or more"),
        ({"n_shared_experts": 10**9}, "n_shared_experts is 1000000000"),
        ({"layer_types": ["full_attention"] * 1_000_001}, "larger than|a list of 1000001"),
        ({"max_position_embeddings": 10**15}, "max_position_embeddings"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"torch_dtype": "float8_e4m3fn", "dtype": None}, "torch_dtype is 'float8_e4m3fn'"),
        ({"dtype": ["float32"]}, "dtype is"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "text_config.num_hidden_layers"),
    ],
)
def test_a_configuration_of_another_kind_or_of_absurd_numbers_is_named(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    sys.set_int_max_str_digits(0)
    try:
        folder = make_llama(tmp_path, **changes)
    finally:
        sys.set_int_max_str_digits(4300)
    line = refusal(folder)
    assert re.search(words, line), line


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("awq", "AWQ"), ("gptq", "GPTQ"), ("fp8", "FP8"), ("bitsandbytes", "bitsandbytes"),
        ("compressed-tensors", "compressed-tensors"), ("torchao", "torchao"), ("mxfp4", "MXFP4"),
        ("eetq", "EETQ"), ("hqq", "HQQ"), ("something\nnew", "something new"),
    ],
)  # fmt: skip
def test_a_quantised_checkpoint_is_named_by_its_method_with_a_way_out_that_it_has(
    method: str, name: str, tmp_path: Path
) -> None:
    line = refusal(make_llama(tmp_path, quantization_config={"quant_method": method}))
    assert f"quantised with {name} (quantization_config in config.json)" in line
    assert "serve the model that it was made from" in line
    assert ("python -m halfmoon_engine.checkpoints.dequantise" in line) == (name in WRITTEN_WHOLE)


def test_a_quantising_tools_file_counts(tmp_path: Path) -> None:
    for name in ("quantize_config.json", "quant_config.json"):
        file = make_llama(tmp_path) / name
        file.write_text("{}")
        assert f"({name})" in refusal(tmp_path)
        file.unlink()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("up_proj.weight", "F8_E4M3"), ("up_proj.weight", "I8"), ("up_proj.weight", "U8"),
        ("up_proj.qweight", "I32"), ("up_proj.scales", "F16"), ("up_proj.weight.absmax", "F32"),
        ("up_proj.weight_scale_inv", "F32"), ("experts.down_proj_blocks", "U8"),
    ],
)  # fmt: skip
def test_quantised_tensors_alone_count(name: str, dtype: str, tmp_path: Path) -> None:
    name = f"model.layers.0.mlp.{name}"
    tensors = {**llama_tensors(), name: (dtype, [16, 16])}
    line = refusal(write_files(make_llama(tmp_path), model__safetensors=safetensors_bytes(tensors)))
    known = " with FP8" if dtype.startswith("F8") else ""
    assert f"is quantised{known} (tensor '{name}' of dtype {dtype})" in line


# Numbers


@pytest.mark.parametrize("eos", [999_999, 32, -1, "2", [2, 10**30], 1.5, True, {"a": 1}])
def test_end_tokens_outside_of_the_vocabulary_are_named(eos: object, tmp_path: Path) -> None:
    write_files(make_llama(tmp_path), generation_config__json={"eos_token_id": eos})
    assert "generation_config.json: eos_token_id" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer__json", "{", "tokenizer.json is not valid JSON"),
        ("tokenizer__json", '{"model": 5}', "has no model in it"),
        ("tokenizer__json", {"model": {"vocab": {"/": 2**31}}}, "token '/' has the id 2147483648"),
        ("tokenizer__json", {"model": {"vocab": {"/": "1"}}}, "token '/' has the id 1"),
        (
            "tokenizer__json",
            {"model": {"continuing_subword_prefix": "##", "merges": ["a ##b", "a b"]}},
            "merge 'a b' lacks the continuing_subword_prefix '##'",
        ),
        (
            "tokenizer__json",
            {"model": {}, "added_tokens": [{"id": 2**24, "content": "<a>"}]},
            "token '<a>' has the id 16777216",
        ),
        ("tokenizer_config__json", '{"chat_template": "', "not valid JSON"),
        ("special_tokens_map__json", "[]", "JSON list"),
        ("tokenizer__json", '{"a": [' + "{}," * 4_000_000 + "0]}", "more than 4000000 JSON"),
        ("tokenizer__json", " " * (65 << 20), "larger than 64 MiB"),
        ("chat_template__jinja", b"\xff", "not UTF-8"),
    ],
)
def test_damaged_text_files_are_named(name: str, content: Any, words: str, tmp_path: Path) -> None:
    assert words in refusal(write_files(make_llama(tmp_path), **{name: content}))


def test_a_folder_without_a_tokenizer_is_refused_where_one_is_needed(tmp_path: Path) -> None:
    (make_llama(tmp_path) / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refusal(tmp_path)
    inspect_folder(tmp_path)


def test_weights_beyond_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_llama(tmp_path)
    monkeypatch.setattr(folder_module, "machine_memory_bytes", lambda: 7000)
    assert re.search("GiB of weights, this machine has", refusal(tmp_path))
    inspect_folder(tmp_path, dtype="float16")


# Weights


def _header(change: Callable[[dict[str, Any]], object]) -> bytes:
    header, data = split_safetensors(BASES)
    changed = change(header)
    return safetensors_with_header(header if changed is None else changed, data)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cut off or not safetensors"),
        (struct.pack("<Q", 65 << 20) + bytes(65 << 20), "a header of 65 MiB"),
        (b"\xff" * 100, "cut off or not safetensors"),
        (struct.pack("<Q", 1 << 60) + BASES[8:], "cut off or not safetensors"),
        (BASES[:200], "cut off"),
        (BASES[:-1], "is cut off: its tensors take"),
        (BASES + b"\0", "bytes that belong to none"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (safetensors_with_header(b"\xff\xff", b""), "not text"),
        (safetensors_with_header(b"{", b""), "not valid JSON"),
        (safetensors_with_header(b"[]", b""), "JSON list"),
        (safetensors_with_header(b'{"a":' * 100_000, b""), "levels deep"),
        (safetensors_with_header({}, b""), "without a tensor"),
        (_header(lambda h: h[NORM].update(dtype="F33")), "unknown dtype 'F33'"),
        (_header(lambda h: h[NORM].update(shape=[17])), "takes 68 bytes, its offsets span 64"),
        (_header(lambda h: h[NORM].update(shape=[-16])), "impossible shape"),
        (_header(lambda h: h[NORM].update(shape=[1 << 70])), "impossible shape"),
        (_header(lambda h: h[NORM].update(shape="16")), "impossible shape"),
        (_header(lambda h: h[NORM].update(shape=[1 << 50] * 16)), "its offsets span"),
        (_header(lambda h: h[NORM].update(data_offsets=[64, 0])), "impossible offsets"),
        (_header(lambda h: h[NORM].update(data_offsets=[0, 1 << 62])), "impossible offsets"),
        (_header(lambda h: h[NORM].update(data_offsets=[0, 64])), "overlap"),
        (_header(lambda h: h.update({NORM: 5})), "not described by an object"),
        (_header(lambda h: {}), "belong to none"),
        (safetensors_bytes({**llama_tensors(), "extra": ("F32", [0, 16])}), "'extra'"),
    ],
)
def test_a_damaged_weights_file_is_named(content: bytes, words: str, tmp_path: Path) -> None:
    line = refusal(write_files(make_llama(tmp_path), model__safetensors=content))
    assert words in line, line


def _sharded(folder: Path, weight_map: dict[str, Any] | None = None, **shards: bytes) -> Path:
    (make_llama(folder) / SINGLE_FILE).unlink()
    tensors = llama_tensors()
    names = list(tensors)
    halves = {"a.safetensors": names[:6], "b.safetensors": names[6:]}
    for name, half in halves.items():
        (folder / name).write_bytes(safetensors_bytes({each: tensors[each] for each in half}))
    right = {name: file for file, half in halves.items() for name in half}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {**right, **(weight_map or {})}}))
    return write_files(folder, **shards)


def test_shards_pass(tmp_path: Path) -> None:
    assert len(inspect_folder(_sharded(tmp_path)).weights.files) == 2


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"more": "c.safetensors"}, "lacks c.safetensors"),
        ({"more": "../c.safetensors"}, "a shard is a file of the same folder"),
        ({"more": 5}, "a shard is a file of the same folder"),
        ({"more": "pytorch_model.bin"}, "safetensors files only"),
        ({"more": "a.safetensors"}, "says that tensor 'more' is in a.safetensors, which lacks it"),
        ({"lm_head.weight": "b.safetensors"}, "which lacks it"),
    ],
)
def test_an_index_of_other_shards_is_named(
    weight_map: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in refusal(_sharded(tmp_path, weight_map))


def test_shards_that_do_not_fit_their_index_are_named(tmp_path: Path) -> None:
    tensors = llama_tensors()
    names = list(tensors)
    more = {each: tensors[each] for each in names[6:]}
    twice = safetensors_bytes({**more, names[0]: tensors[names[0]]})
    line = refusal(_sharded(tmp_path / "1", b__safetensors=twice))
    assert f"'{names[0]}' is in a.safetensors and in b.safetensors" in line
    extra = safetensors_bytes({**more, "extra": ("F32", [16])})
    assert "'extra'" in refusal(_sharded(tmp_path / "2", b__safetensors=extra))
    both = _sharded(tmp_path / "3", model__safetensors=BASES)
    assert "remove those that are not meant" in refusal(both)
    for content in ("[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "{"):
        (tmp_path / "2" / INDEX_FILE).write_text(content)
        assert INDEX_FILE in refusal(tmp_path / "2")


# Links and other things that are not files


def test_links_within_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b/snapshots/0f"
    make_llama(blobs)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(blobs.iterdir())):
        blob = path.rename(blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    check_model(str(snapshot))
    (tmp_path / "link").symlink_to(snapshot)
    check_model(str(tmp_path / "link"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_pipe_a_folder_or_a_loop_in_a_files_place_is_named(name: str, tmp_path: Path) -> None:
    makers: list[Callable[[Path], object]] = [
        os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("nothing-here"),
    ]  # fmt: skip
    for number, make in enumerate(makers):
        folder = make_llama(tmp_path / str(number))
        (folder / name).unlink()
        make(folder / name)
        assert name in refusal(folder)


def test_inputs_of_a_multimodal_model_that_are_not_served_are_named(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "vision_config": {}, "audio_config": {}, "text_config": {}}
    said = unserved_inputs(config)
    assert said.startswith("Of a model of type 'gemma3', text is served alone")
    assert "requests with images or sounds are refused (vision_config, audio_config" in said
    assert unserved_inputs(check_model(str(make_llama(tmp_path)))) == ""
    assert unserved_inputs(check_model("fake://tiny")) == ""
