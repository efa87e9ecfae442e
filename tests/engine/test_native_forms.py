"""Models with a native form are computed by it: a fall-back to torch would hide its faults."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from halfmoon_engine.load import load_engine
from halfmoon_engine.native.decoder_reader import FAMILIES
from halfmoon_engine.native.extension import SWITCH, NativeUnavailable
from halfmoon_models.errors import ModelError
from halfmoon_protocol.kv_layout import DType
from halfmoon_testing.models.tiny_models import ARCHITECTURES
from tests.engine.driver import Driver, EngineOf, Tiny, open_tiny, prompt_of


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_is_computed_by_what_has_a_form_for_it(
    arch: str, dtype: DType, native: str, engine_of: EngineOf, tiny: Tiny
) -> None:
    kind = json.loads((tiny(arch) / "config.json").read_text())["model_type"]
    by_torch = native == "off" or kind not in FAMILIES
    description = engine_of(arch, 16, dtype).description
    assert ("torch" in description) == by_torch
    assert ("kernels" in description) == (native == "on")


def changed(model: Path, tmp_path: Path, **fields: Any) -> Path:
    folder = shutil.copytree(model, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


def test_angles_of_a_context_that_is_no_power_of_two_are_those_of_its_short_factors(
    tiny: Tiny, native: str, tmp_path: Path
) -> None:
    """LongRoPE swaps all frequencies beyond its original context."""
    folder = changed(tiny("phi3"), tmp_path, original_max_position_embeddings=4500)
    answers = []
    for each in ("off", native):
        engine = open_tiny(folder, block_size=64, threads=2, native=each)
        answers.append(Driver(engine, 4300).generate(prompt_of(4200), 8))
    assert engine.max_context == 4500
    assert ("kernels" in engine.description) == (native == "on")
    assert answers[0] == answers[1]


def test_a_very_short_context_is_computed_by_torch(tiny: Tiny, native: str, tmp_path: Path) -> None:
    folder = changed(tiny("qwen3"), tmp_path, max_position_embeddings=3)
    engine = open_tiny(folder, threads=2, native=native)
    assert engine.max_context == 3
    assert "torch" in engine.description
    assert len(Driver(engine, 3).generate([5, 9], 1)) == 1


def test_a_missing_extension_is_one_line(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setitem(sys.modules, "halfmoon_engine_native", None)  # as if it were not there
    with pytest.raises(NativeUnavailable, match="make native") as refused:
        load_engine(str(tiny("llama")), block_size=16)
    assert isinstance(refused.value, ModelError)
