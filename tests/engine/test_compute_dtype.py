"""Of a checkpoint follow the precision that "auto" stands for, and a fingerprint of its files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers as untyped_transformers

from halfmoon_engine.checkpoints import compute_dtype
from halfmoon_engine.checkpoints import fingerprint as module
from halfmoon_engine.checkpoints.compute_dtype import FLOAT32_SHARE, choose_dtype, saved_dtype
from halfmoon_engine.checkpoints.fingerprint import fingerprint
from halfmoon_engine.checkpoints.model_folder import open_model_folder
from halfmoon_engine.load import load_engine
from halfmoon_engine.processor_features import parse_cpuinfo, processor_features
from halfmoon_models.errors import ModelNotFound
from halfmoon_protocol.kv_layout import DType
from halfmoon_testing.models.llama_folders import make_llama
from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.engine.driver import Tiny

transformers: Any = untyped_transformers
GIB = 1 << 30
AVX2 = frozenset({"sse2", "avx2", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}


def chosen(features: frozenset[str] | None, memory_bytes: int | None, **options: Any) -> Any:
    """What is chosen for a billion numbers in bfloat16, unless options say otherwise."""
    usual = {"saved": "bfloat16", "native": False, "n_elements": 10**9}
    return choose_dtype(features=features, memory_bytes=memory_bytes, **{**usual, **options})


@pytest.mark.parametrize(
    ("saved", "features", "native", "memory_gib", "wanted"),
    [
        ("float32", AVX2, False, 4, "float32"),
        ("bfloat16", AVX2, False, 64, "float32"),
        ("bfloat16", AVX512, False, 64, "float32"),
        ("bfloat16", AVX512 | {"avx512_bf16"}, False, 64, "bfloat16"),
        ("bfloat16", AVX512 | {"amx_bf16"}, False, 64, "bfloat16"),
        ("bfloat16", AVX2 | {"avx_ne_convert"}, False, 64, "bfloat16"),
        ("bfloat16", frozenset({"asimd", "bf16"}), False, 64, "bfloat16"),
        ("bfloat16", frozenset({"asimd"}), False, 64, "float32"),
        ("bfloat16", AVX2, True, 64, "bfloat16"),
        ("bfloat16", AVX2, False, 8, "bfloat16"),
        ("bfloat16", AVX2, False, None, "float32"),
        ("bfloat16", None, False, 64, "bfloat16"),
        ("float16", AVX512 | {"avx512_bf16"}, False, 64, "float32"),
        ("float16", AVX512 | {"avx512_fp16"}, False, 64, "float16"),
        ("float16", frozenset({"asimd", "asimdhp"}), False, 64, "float16"),
        ("float16", AVX2, True, 64, "float16"),
    ],
)
def test_half_precision_needs_its_instructions_or_the_extension(
    saved: DType,
    features: frozenset[str] | None,
    native: bool,
    memory_gib: int | None,
    wanted: DType,
) -> None:
    memory = None if memory_gib is None else memory_gib * GIB
    choice = chosen(features, memory, saved=saved, native=native)
    assert choice.dtype == wanted
    slow = features is not None and memory_gib == 8
    assert bool(choice.reason) == (wanted != saved or slow)


def test_float32_weights_may_take_a_share_of_the_memory_and_no_more() -> None:
    most = int(FLOAT32_SHARE * 16 * GIB) // 4
    choices = [chosen(AVX2, 16 * GIB, n_elements=n) for n in (most, most + 1)]
    assert [choice.dtype for choice in choices] == ["float32", "bfloat16"]


def test_features_are_those_that_all_processors_have() -> None:
    text = "processor : 0\nflags\t\t: sse2 avx2 amx_bf16\n\nprocessor : 1\nflags : sse2 avx2\n"
    assert parse_cpuinfo(text) == frozenset({"sse2", "avx2"})
    assert parse_cpuinfo("processor : 0\nFeatures : asimd bf16\n") == frozenset({"asimd", "bf16"})
    assert parse_cpuinfo("") is None
    assert parse_cpuinfo("flags") is None
    assert processor_features()


@pytest.fixture
def half(tiny: Tiny, tmp_path: Path) -> Path:
    """A checkpoint in bfloat16."""
    source = tiny("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16")
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("features", "asked", "wanted"),
    [
        (AVX2, "auto", "float32"),
        (AVX2, "bfloat16", "bfloat16"),
        (AVX512 | {"avx512_bf16"}, "auto", "bfloat16"),
        (AVX512 | {"avx512_bf16"}, "float32", "float32"),
    ],
)
def test_a_checkpoint_is_loaded_in_the_precision_that_was_chosen(
    features: frozenset[str],
    asked: Any,
    wanted: DType,
    half: Path,
    native: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(compute_dtype, "processor_features", lambda: features)
    engine = load_engine(
        str(half), block_size=16, dtype=asked, device="cpu", threads=1, native=native
    )
    slow = asked == "auto" and wanted == "float32" and native == "off"
    assert engine.layout.dtype == (wanted if native == "off" or asked != "auto" else "bfloat16")
    said = "computing in float32" in caplog.text and "--dtype bfloat16" in caplog.text
    assert said == slow


def test_the_precision_of_a_checkpoint_is_its_configs_or_all_tensors(tmp_path: Path) -> None:
    def saved(name: str, **changes: Any) -> DType | None:
        return saved_dtype(open_model_folder(str(make_llama(tmp_path / name, **changes))))

    assert saved("torch", torch_dtype="bfloat16", dtype=None) == "bfloat16"
    assert saved("new", dtype="float16") == "float16"
    assert saved("none", torch_dtype=None, dtype=None) == "float32"


@pytest.fixture
def copy(tiny: Tiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("llama"), tmp_path / "copy"))


@pytest.fixture(params=["whole files", "samples"])
def hashed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "samples":
        monkeypatch.setattr(module, "WHOLE_BYTES", 0)
    return str(request.param)


def test_copies_are_equal_others_are_not(
    hashed: str, tiny: Tiny, copy: Path, tmp_path: Path
) -> None:
    original = fingerprint(tiny("llama"))
    assert len(original) == 32
    assert fingerprint(copy) == original
    assert fingerprint(make_tiny_model("llama", tmp_path / "other", seed=2)) != original


def test_a_changed_bit_in_a_tensor_changes_it(hashed: str, copy: Path) -> None:
    before = fingerprint(copy)
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert fingerprint(copy) != before


def test_config_counts_but_not_its_dtype_or_software(copy: Path) -> None:
    before = fingerprint(copy)
    path = copy / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "dtype": "bfloat16", "transformers_version": "9"}))
    assert fingerprint(copy) == before
    path.write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    assert fingerprint(copy) != before


def test_tokenizer_and_stray_files_do_not_count(copy: Path) -> None:
    before = fingerprint(copy)
    (copy / "tokenizer.json").write_text("{}")
    (copy / "consolidated.safetensors").write_bytes(b"x")
    assert fingerprint(copy) == before


def test_an_index_names_the_files(copy: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "missing.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFound, match=r"lacks missing\.safetensors"):
        fingerprint(copy)


def test_a_broken_weights_file_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", 0)
    (copy / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelNotFound, match="not a safetensors file"):
        fingerprint(copy)
