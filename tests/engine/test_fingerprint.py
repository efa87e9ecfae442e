"""Equal files, equal fingerprints; other weights or another config, another one."""

import json
import shutil
from pathlib import Path

import pytest

from halfmoon_engine.checkpoints import fingerprint as module
from halfmoon_engine.checkpoints.fingerprint import fingerprint
from halfmoon_models.errors import ModelNotFound
from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.engine.driver import Tiny


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
