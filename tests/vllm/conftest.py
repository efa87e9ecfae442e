"""Models that vLLM's CPU kernels can compute, and engines of both kinds on them.

These tests need the environment of `make test-vllm`; elsewhere they are skipped.
"""

import mmap
import os
import random
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from halfmoon_engine.interface import Draw, Engine, Run
from halfmoon_engine.load import open_engine
from halfmoon_protocol.sampling import Sampling
from halfmoon_testing.models.tiny_models import make_tiny_model

if TYPE_CHECKING:
    from tests.vllm.connector_fleet import Fleet

#: vLLM's kernels for CPUs take heads of these sizes: 32, 64, 80, 96, 112, 128, … And pages of a
#: multiple of 32 tokens.
HEAD_DIM = 32
BLOCK_SIZE = 32
#: Fields beside the head size that must fit it. Those that vLLM computes by transformers' own
#: classes (olmo2, starcoder2, glm) change these, so no reference can run beside them.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": HEAD_DIM},
    "qwen2": {"head_dim": HEAD_DIM, "hidden_size": 4 * HEAD_DIM},
    "qwen3": {"head_dim": HEAD_DIM},
    "mistral": {"head_dim": HEAD_DIM},
    "gemma3": {"head_dim": HEAD_DIM},
    "phi3": {},
    "granite": {"head_dim": HEAD_DIM, "hidden_size": 8 * HEAD_DIM},
    "glm4": {"head_dim": 64},
    "cohere": {"head_dim": HEAD_DIM, "hidden_size": 4 * HEAD_DIM},
    # vLLM's sliding window is one token wider for this one alone: see `narrow_cohere2`.
    "cohere2": {"head_dim": HEAD_DIM, "hidden_size": 4 * HEAD_DIM, "sliding_window": 8192},
    # vLLM takes no head of its own, and published models have none.
    "gemma2": {"head_dim": HEAD_DIM, "tie_word_embeddings": True},
}
GREEDY = Draw(Sampling(temperature=0.0))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None or find_spec("halfmoon_engine_vllm") is None:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vllm is not installed: make test-vllm"))


class Pool:
    """An engine over shared memory of its own, whose unused slots are no numbers."""

    def __init__(self, engine: Engine, n_pages: int = 80, seed: int = 0) -> None:
        self.engine = engine
        self.size = engine.layout.block_bytes
        fd = os.memfd_create("tests")
        os.truncate(fd, n_pages * self.size)
        self.fd = fd
        self.bytes = memoryview(mmap.mmap(fd, n_pages * self.size))
        self.bytes[:] = b"\xff" * len(self.bytes)
        engine.attach(self.bytes)
        self._free = list(range(n_pages))
        random.Random(seed).shuffle(self._free)

    def pages_for(self, n_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(self.engine.layout.blocks_for(n_tokens))]

    def free(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)

    def page(self, number: int) -> memoryview:
        return self.bytes[number * self.size : (number + 1) * self.size]

    def generate(
        self,
        prompt: Sequence[int],
        n: int,
        *,
        chunk: int = 512,
        pages: Sequence[int] | None = None,
        cached: int = 0,
        sampling: Sampling | None = None,
    ) -> list[int]:
        """Prefill in chunks from position `cached` on, then decode, to `n` new tokens."""
        own = self.pages_for(len(prompt) + n) if pages is None else list(pages)
        tokens, start = list(prompt), cached
        mine = False
        while len(tokens) < len(prompt) + n:
            part = tokens[start : start + chunk]
            last = start + len(part) == len(tokens)
            draw = Draw(sampling or Sampling(temperature=0.0), tuple(tokens), len(prompt))
            run = Run(part, start, own, draw if last else None, continues=mine)
            (token,) = self.engine.forward([run])
            start, mine = start + len(part), True
            if last:
                assert isinstance(token, int)
                tokens.append(token)
        if pages is None:
            self.free(own)
        return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the tiny model of an architecture."""
    root = tmp_path_factory.mktemp("models")

    def folder(arch: str) -> Path:
        path = root / arch
        return path if path.exists() else make_tiny_model(arch, path, 1, ARCHITECTURES[arch])

    return folder


def _generated(model: Any, prompt: Sequence[int], n: int) -> list[int]:
    """Greedy output of transformers' own `generate`."""
    import torch

    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=n,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.fixture(scope="session")
def narrow_cohere2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A model with a short sliding window, and what transformers says with one token more."""
    import transformers as untyped_transformers

    transformers: Any = untyped_transformers
    fields = {**ARCHITECTURES["cohere2"], "sliding_window": 32}
    folder = make_tiny_model("cohere2", tmp_path_factory.mktemp("cohere2") / "narrow", 1, fields)
    config = transformers.AutoConfig.from_pretrained(folder, sliding_window=33)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, attn_implementation="eager"
    )
    return folder, _generated(model, prompt_of(200), 8)


@pytest.fixture(scope="session")
def engine_of(
    model_of: Callable[[str], Path], reference: object, narrow_cohere2: object
) -> Callable[..., Engine]:
    """An engine on a tiny model, remembered by its arguments."""
    engines: dict[tuple[Any, ...], Engine] = {}
    # Before vLLM is imported: it changes classes of transformers.
    for arch in ARCHITECTURES:
        engines[arch, "torch"] = open_engine(
            str(model_of(arch)), block_size=BLOCK_SIZE, dtype="float32", device="cpu", threads=1
        )

    def load(arch: str, engine: str = "vllm", **options: str) -> Engine:
        key = (arch, engine, *sorted(options.items()))
        if key not in engines:
            if engine == "vllm":
                options.setdefault("enforce_eager", "true")
            engines[key] = open_engine(
                str(model_of(arch)),
                block_size=BLOCK_SIZE,
                dtype="float32",
                device="cpu",
                threads=1,
                engine=engine,
                engine_options=options,
            )
        return engines[key]

    return load


@pytest.fixture(scope="session")
def make_pool() -> Callable[..., Pool]:
    return Pool


@pytest.fixture(scope="session")
def reference(model_of: Callable[[str], Path]) -> Callable[[str, Sequence[int], int], list[int]]:
    """Greedy output of transformers' own `generate`."""
    import transformers as untyped_transformers

    transformers: Any = untyped_transformers
    # Before vLLM is imported: it changes classes of transformers.
    models = {
        arch: transformers.AutoModelForCausalLM.from_pretrained(
            model_of(arch), attn_implementation="eager"
        )
        for arch in ARCHITECTURES
    }
    return lambda arch, prompt, n: _generated(models[arch], prompt, n)


def prompt_of(n: int, seed: int = 0) -> list[int]:
    """A prompt of that many tokens, always the same."""
    dice = random.Random(f"{n} {seed}")
    return [dice.randrange(3, 384) for _ in range(n)]


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Fleet]":
    """Two servers and a kvstore."""
    from tests.vllm.connector_fleet import Fleet
    from tests.vllm.pool_processes import PoolProcesses

    folder = tmp_path_factory.mktemp("fleet")
    model = make_tiny_model("llama", folder / "llama", 1, ARCHITECTURES["llama"])
    pool = PoolProcesses(folder)
    fleet = Fleet(folder, pool, model)
    try:
        pool.start_kvstore("kvstore-0")
        # The second one has larger blocks than the pool.
        for server in [
            fleet.start(),
            fleet.start(vllm_block=2 * BLOCK_SIZE, block_size=BLOCK_SIZE),
        ]:
            server.wait_until_ready()
        yield fleet
    finally:
        for server in fleet.servers:
            server.stop()
        pool.stop()
