"""Models with a native form are computed by it: a fall-back to torch would hide its faults."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from halfmoon_engine.native.decoder_reader import FAMILIES
from halfmoon_engine.torch_engine import TorchEngine
from halfmoon_protocol.kv_layout import DType
from halfmoon_testing.models.tiny_models import ARCHITECTURES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_is_computed_by_what_has_a_form_for_it(
    arch: str,
    dtype: DType,
    native: str,
    engine_of: Callable[..., TorchEngine],
    tiny: Callable[[str], Path],
) -> None:
    kind = json.loads((tiny(arch) / "config.json").read_text())["model_type"]
    by_torch = native == "off" or kind not in FAMILIES
    description = engine_of(arch, 16, dtype).description
    assert ("torch" in description) == by_torch
    assert ("kernels" in description) == (native == "on")
