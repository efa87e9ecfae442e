"""The test everything leans on: through prefill, transfer and decode, greedy fp32 tokens are
those of `transformers.generate`, whatever the architecture, the chunking, the blocks, what is
cached, and who else is served.
"""

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from halfmoon_engine.interface import Engine
from halfmoon_engine.load import open_engine
from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.nightly import by_day

LocalCluster = Callable[..., Any]
Oracle = Callable[[list[int], int], list[int]]
N_NEW = 12
#: One of each way in which KV differs: full, windows, both in turn. Arithmetic is tests/engine's.
ARCHITECTURES = ("llama", "qwen3", "mistral", "gemma2", "gemma3")


def prompt_of(n: int, salt: int = 0) -> list[int]:
    return [10 + (i * 37 + salt * 101 + i * i // 7) % 300 for i in range(n)]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder(arch: str) -> Path:
        return make_tiny_model(arch, tmp_path_factory.mktemp(arch))

    return folder


@pytest.fixture(scope="session")
def oracle(model_folder: Callable[[str], Path]) -> Callable[[str], Oracle]:
    """`transformers.generate`, remembering what it said."""

    @cache
    def of(arch: str) -> Oracle:
        model: Any = AutoModelForCausalLM.from_pretrained(model_folder(arch), dtype=torch.float32)
        model.generation_config.eos_token_id = None  # our requests here have no stop token
        said: dict[tuple[tuple[int, ...], int], list[int]] = {}

        def generate(prompt: list[int], n_new: int) -> list[int]:
            key = (tuple(prompt), n_new)
            if key not in said:
                out = model.generate(
                    torch.tensor([prompt]), do_sample=False, max_new_tokens=n_new, pad_token_id=0
                )
                said[key] = out[0, len(prompt) :].tolist()
            return said[key]

        return generate

    return of


def engine_maker(folder: Path, block_size: int) -> Callable[[], Engine]:
    return lambda: open_engine(
        str(folder), block_size=block_size, dtype="float32", device="cpu", threads=2
    )


_NIGHT = pytest.mark.nightly(
    "greedy tokens through all services equal transformers' in each shape of KV, chunk and block"
)
#: Each shape of KV in small blocks; large blocks and single tokens by one of them.
SHAPES = [
    pytest.param(
        arch,
        chunk_tokens,
        block_size,
        marks=[] if arch == "gemma3" or (chunk_tokens > 1 and block_size == 16) else _NIGHT,
    )
    for arch in ARCHITECTURES
    for chunk_tokens in (1, 7, 512)
    for block_size in (16, 512)
]
#: Prompt lengths by chunk size: one token at a time takes a forward pass per token.
LENGTHS = {
    1: (1, 17, 130),
    7: (1, 16, 33, 400),
    512: (1, 15, 16, 17, 100, 513, by_day(1300, at_night=3000)),
}


@pytest.mark.parametrize(("arch", "chunk_tokens", "block_size"), SHAPES)
async def test_tokens_are_those_of_transformers_cold_partly_and_fully_cached(
    local_cluster: LocalCluster,
    model_folder: Callable[[str], Path],
    oracle: Callable[[str], Oracle],
    arch: str,
    chunk_tokens: int,
    block_size: int,
) -> None:
    make = engine_maker(model_folder(arch), block_size)
    expected = oracle(arch)
    n_pages = 600 if block_size == 16 else 24
    async with local_cluster(make, chunk_tokens=chunk_tokens, n_pages=n_pages) as cluster:
        for n_tokens in LENGTHS[chunk_tokens]:
            cold = prompt_of(n_tokens, salt=n_tokens)
            # The same blocks up to the middle, then another way.
            partly = cold[: n_tokens // 2] + prompt_of(n_tokens - n_tokens // 2, salt=999)
            for prompt in (cold, partly, cold):
                said = await asyncio.to_thread(expected, prompt, N_NEW)
                assert await cluster.generate(prompt, N_NEW) == said
                await cluster.settled()
            whole = (n_tokens - 1) // block_size * block_size
            assert await cluster.n_cached(cold) == whole


@pytest.mark.parametrize("block_size", [16, pytest.param(512, marks=_NIGHT)])
@pytest.mark.parametrize("arch", ARCHITECTURES)
async def test_sixteen_mixed_requests_at_once_in_two_by_two(
    local_cluster: LocalCluster,
    model_folder: Callable[[str], Path],
    oracle: Callable[[str], Oracle],
    arch: str,
    block_size: int,
) -> None:
    prompts = [prompt_of(1 + (i * i * 5) % 700, salt=i % 4) for i in range(16)]
    async with local_cluster(
        engine_maker(model_folder(arch), block_size),
        n_prefill=2,
        n_decode=2,
        n_kvstore=2,
        chunk_tokens=64,
        n_pages=800 if block_size == 16 else 64,
    ) as cluster:
        answers = await asyncio.gather(*(cluster.generate(p, N_NEW) for p in prompts))
        expected = oracle(arch)
        assert answers == await asyncio.to_thread(lambda: [expected(p, N_NEW) for p in prompts])
        await cluster.settled()


@pytest.mark.parametrize("backends", [("shm",), ("tcp",)])
async def test_the_wire_makes_no_difference(
    local_cluster: LocalCluster,
    model_folder: Callable[[str], Path],
    oracle: Callable[[str], Oracle],
    backends: tuple[str, ...],
) -> None:
    prompts = [prompt_of(n, salt=n) for n in (17, 300)]
    make = engine_maker(model_folder("llama"), 16)
    async with local_cluster(make, backends=backends) as cluster:
        for prompt in [*prompts, *prompts]:
            said = await asyncio.to_thread(oracle("llama"), prompt, N_NEW)
            assert await cluster.generate(prompt, N_NEW) == said
            await cluster.settled()
