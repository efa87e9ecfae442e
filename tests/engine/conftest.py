"""Tiny models, made once, engines on them, and what transformers generates by them."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.engine.driver import EngineOf, Reference, Tiny, generated, open_tiny

#: Choices of `open_engine`'s option `native` that each test of an engine's arithmetic runs with.
NATIVE_CHOICES = (
    "off",
    pytest.param(
        "on",
        marks=pytest.mark.skipif(
            find_spec("halfmoon_engine_native") is None,
            reason="the engine's native extension is not built: make native",
        ),
    ),
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = tmp_path_factory.mktemp("tiny")

    def folder(arch: str) -> Path:
        path = root / arch
        return path if path.exists() else make_tiny_model(arch, path, seed=1)

    return folder


@pytest.fixture(scope="session")
def reference(tiny: Tiny) -> Reference:
    """Greedy output of transformers' own `generate`, with its options, remembered."""
    models: dict[str, Any] = {}
    known: dict[tuple[str, tuple[int, ...], int, str], list[int]] = {}

    def generate(arch: str, prompt: Sequence[int], n: int, **options: Any) -> list[int]:
        import torch

        torch.set_num_threads(1)
        import transformers as untyped_transformers

        transformers: Any = untyped_transformers
        key = (arch, tuple(prompt), n, repr(options))
        if key not in known:
            if arch not in models:
                models[arch] = transformers.AutoModelForCausalLM.from_pretrained(
                    tiny(arch), attn_implementation="eager"
                )
            known[key] = generated(models[arch], prompt, n, **options)
        return known[key]

    return generate


@pytest.fixture(scope="session", params=NATIVE_CHOICES)
def native(request: pytest.FixtureRequest) -> str:
    """Whether engines use the native extension."""
    return str(request.param)


@pytest.fixture(scope="session")
def engine_of(tiny: Tiny, native: str) -> EngineOf:
    """An engine on a tiny model, remembered by its arguments."""
    engines: dict[tuple[Any, ...], Any] = {}

    def load(arch: str, block_size: int = 16, dtype: Any = "float32") -> Any:
        key = (arch, block_size, dtype)
        if key not in engines:
            engines[key] = open_tiny(tiny(arch), block_size=block_size, dtype=dtype, native=native)
        return engines[key]

    return load
