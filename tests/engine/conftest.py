"""Tiny models, made once, and a driver that runs an engine as prefill and decode do."""

import random
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from halfmoon_engine.interface import Draw, Engine, Run
from halfmoon_engine.load import open_engine
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_testing.models.tiny_models import make_tiny_model

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


class Driver:
    """An engine over a pool of its own, with pages handed out in random order."""

    def __init__(self, engine: Engine, n_tokens: int, seed: int = 0) -> None:
        self.engine = engine
        self.n_pages = engine.layout.blocks_for(n_tokens) + 8
        # Garbage that no correct computation survives: the pool's unused slots are NaN.
        self.pool = bytearray(b"\xff" * (self.n_pages * engine.layout.block_bytes))
        engine.attach(memoryview(self.pool))
        self._free = list(range(self.n_pages))
        random.Random(seed).shuffle(self._free)

    def pages_for(self, n_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(self.engine.layout.blocks_for(n_tokens))]

    def free(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)

    def page_bytes(self, page: int) -> memoryview:
        size = self.engine.layout.block_bytes
        return memoryview(self.pool)[page * size : (page + 1) * size]

    def generate(
        self,
        prompt: Sequence[int],
        n: int,
        *,
        chunk: int = 512,
        cached: int = 0,
        pages: Sequence[int] | None = None,
        sampling: Sampling | None = None,
        stopping: Stopping | None = None,
    ) -> list[int]:
        """Prefill from position `cached` on in chunks, then decode, to `n` new tokens.

        Stop tokens are masked as `stopping` says, and end nothing.
        """
        sampling = sampling or Sampling(temperature=0.0)
        own = self.pages_for(len(prompt) + n) if pages is None else list(pages)
        tokens, start = list(prompt), cached
        while len(tokens) < len(prompt) + n:
            part = tokens[start : start + chunk]
            last = start + len(part) == len(tokens)
            masked = stopping.masked_after(len(tokens) - len(prompt)) if stopping else ()
            draw = Draw(sampling, tuple(tokens), len(prompt), masked=masked) if last else None
            (token,) = self.engine.forward([Run(part, start, own, draw)])
            start += len(part)
            if last:
                assert isinstance(token, int)
                tokens.append(token)
        if pages is None:
            self.free(own)
        return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def make_driver() -> Callable[..., Driver]:
    return Driver


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the tiny model of an architecture."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(arch: str) -> Path:
        path = root / arch
        return path if path.exists() else make_tiny_model(arch, path, seed=1)

    return folder


@pytest.fixture(scope="session")
def reference(tiny: Callable[[str], Path]) -> Callable[..., list[int]]:
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
            ids = torch.tensor([list(prompt)])
            out = models[arch].generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **{
                    "do_sample": False,
                    "max_new_tokens": n,
                    "eos_token_id": None,
                    "pad_token_id": 0,
                    **options,
                },
            )
            known[key] = out[0, len(prompt) :].tolist()
        return known[key]

    return generate


@pytest.fixture(scope="session", params=NATIVE_CHOICES)
def native(request: pytest.FixtureRequest) -> str:
    """Whether engines use the native extension."""
    return str(request.param)


@pytest.fixture(scope="session")
def engine_of(tiny: Callable[[str], Path], native: str) -> Callable[..., Engine]:
    """An engine on a tiny model, remembered by its arguments."""
    engines: dict[tuple[Any, ...], Engine] = {}
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "native": native}

    def load(arch: str, block_size: int = 16, dtype: Any = "float32") -> Engine:
        key = (arch, block_size, dtype)
        if key not in engines:
            engines[key] = open_engine(
                str(tiny(arch)), block_size=block_size, dtype=dtype, **options
            )
        return engines[key]

    return load


@pytest.fixture(scope="session")
def prompt_of() -> Callable[[int], list[int]]:
    """A prompt of that many tokens, always the same."""

    def prompt(n: int) -> list[int]:
        dice = random.Random(n)
        return [dice.randrange(3, 384) for _ in range(n)]

    return prompt
