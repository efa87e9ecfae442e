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

from halfmoon_engine.interface import Draw, Engine
from halfmoon_engine.load import open_engine
from halfmoon_protocol.sampling import Sampling
from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.engine.driver import Driver, generated

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
    # vLLM's sliding window is one token wider for this one alone: it is wide here.
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


class Pool(Driver):
    """An engine over memory that its ranks can map."""

    continues = True

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        super().__init__(engine, 72 * BLOCK_SIZE, seed, _shared_memory)


def _shared_memory(n_bytes: int) -> mmap.mmap:
    fd = os.memfd_create("tests")
    os.truncate(fd, n_bytes)
    return mmap.mmap(fd, n_bytes)


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the tiny model of an architecture."""
    root = tmp_path_factory.mktemp("models")

    def folder(arch: str) -> Path:
        path = root / arch
        return path if path.exists() else make_tiny_model(arch, path, 1, ARCHITECTURES[arch])

    return folder


@pytest.fixture(scope="session")
def engine_of(model_of: Callable[[str], Path], reference: object) -> Callable[..., Engine]:
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
    return lambda arch, prompt, n: generated(models[arch], prompt, n)


def prompt_of(n: int, seed: int = 0) -> list[int]:
    """A prompt of that many tokens, always the same."""
    dice = random.Random(f"{n} {seed}")
    return [dice.randrange(3, 384) for _ in range(n)]


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Fleet]":
    """Two servers and a kvstore."""
    from tests.vllm.connector_fleet import Fleet, PoolProcesses

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
