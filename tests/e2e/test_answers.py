"""Conversations with real processes: each turn reads the KV of the answers before it."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from halfmoon_engine.fake_engine import FakeEngine, parse_fake_spec

pytestmark = pytest.mark.e2e

BLOCK = 16
N_NEW = 40
StartCluster = Callable[..., Any]


def message_of(turn: int) -> list[int]:
    return [10 + (i * 37 + turn * 101) % 300 for i in range(21 + 9 * turn)]


@pytest.fixture(scope="module")
def generated(tiny_model: Path) -> Callable[[list[int]], list[int]]:
    """What transformers itself says."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # our requests ignore it

    def generate(prompt: list[int]) -> list[int]:
        out = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=N_NEW, pad_token_id=0
        )
        return list(out[0, len(prompt) :].tolist())

    return generate


def n_indexed(cluster: Any) -> int:
    """Blocks that the conductor knows of."""
    workers = cluster.get("/debug/cluster")["workers"]
    return sum(int(w["load"]["n_indexed"]) for w in workers if w["role"] == "kvstore")


def knows(cluster: Any, n_blocks: int) -> bool:
    return n_indexed(cluster) == n_blocks


def ask(cluster: Any, prompt: list[int]) -> tuple[list[int], int]:
    """The answer, and how many tokens of its prompt were cached."""
    said = cluster.complete(
        prompt=prompt, max_tokens=N_NEW, temperature=0, ignore_eos=True, return_token_ids=True
    )
    cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
    return list(said["choices"][0]["token_ids"]), int(cached)


def test_each_turn_of_a_conversation_reads_the_answers_before_it(
    start_cluster: StartCluster, tiny_model: Path, generated: Callable[[list[int]], list[int]]
) -> None:
    fp32 = ["--dtype", "float32", "--block-size", str(BLOCK)]
    extra = {"prefill": fp32, "decode": fp32}
    with start_cluster(str(tiny_model), n_prefill=2, n_decode=2, extra=extra) as cluster:
        said: list[int] = []
        for turn in range(5):
            prompt = [*said, *message_of(turn)]
            answer, n_cached = ask(cluster, prompt)
            assert answer == generated(prompt)
            n_whole = max(0, len(said) - 1) // BLOCK * BLOCK  # the last token was never run
            assert n_cached == n_whole
            said = [*prompt, *answer]
            cluster.until(partial(knows, cluster, (len(said) - 1) // BLOCK))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_kvstore_that_ends_or_hangs_under_an_answer_costs_no_token(
    start_cluster: StartCluster, number: signal.Signals
) -> None:
    engine = FakeEngine(parse_fake_spec("fake://slow"), block_size=BLOCK)
    extra = {"decode": ["--block-size", str(BLOCK)], "prefill": ["--block-size", str(BLOCK)]}
    with start_cluster("fake://slow?step_s=0.02", extra=extra) as cluster:
        prompt = message_of(1)
        ask(cluster, prompt)
        cluster.until(lambda: n_indexed(cluster) >= 3)
        cluster.process("kvstore-0").signal(number)
        for turn in range(2):
            prompt = message_of(2 + turn)
            assert ask(cluster, prompt)[0] == engine.expected(prompt, N_NEW)
