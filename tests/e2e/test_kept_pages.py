"""Conversations with real processes: decode gets the blocks that it does not have."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.e2e

BLOCK = 16
N_NEW = 40
FP32 = ["--dtype", "float32", "--block-size", str(BLOCK)]
StartCluster = Callable[..., Any]
Generate = Callable[[list[int]], list[int]]


def message_of(turn: int) -> list[int]:
    return [10 + (i * 37 + turn * 101) % 300 for i in range(21 + 9 * turn)]


@pytest.fixture(scope="module")
def generated(tiny_model: Path) -> Generate:
    """What transformers itself says."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # our requests ignore it

    def generate(prompt: list[int]) -> list[int]:
        out = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=N_NEW, pad_token_id=0
        )
        return list(out[0, len(prompt) :].tolist())

    return generate


@pytest.fixture(scope="module")
def block_bytes(tiny_model: Path) -> int:
    config = AutoConfig.from_pretrained(tiny_model)
    width = config.num_key_value_heads * config.head_dim
    return int(config.num_hidden_layers * 2 * BLOCK * width * 4)  # keys and values in float32


def landing_bytes(cluster: Any, source: str) -> int:
    """Bytes of landings that were sent by prefill processes, or held by decode before."""
    n_bytes = 0
    for name, process in cluster.cluster.processes.items():
        if name.startswith("prefill"):
            page = httpx.get(f"{process.status['operators']}/metrics", timeout=10).text
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    if sample.name == "halfmoon_prefill_landing_bytes_total":
                        n_bytes += int(sample.value) * (sample.labels["source"] == source)
    return n_bytes


def ask(cluster: Any, prompt: list[int]) -> list[int]:
    said = cluster.complete(
        prompt=prompt, max_tokens=N_NEW, temperature=0, ignore_eos=True, return_token_ids=True
    )
    return list(said["choices"][0]["token_ids"])


def converse(cluster: Any, generated: Generate, n_turns: int) -> list[tuple[int, int, int]]:
    """Have a conversation; of each turn: bytes sent, bytes held, and tokens before its message."""
    said: list[int] = []
    seen: list[tuple[int, int, int]] = []
    for turn in range(n_turns):
        before = [landing_bytes(cluster, source) for source in ("sent", "held")]
        prompt = [*said, *message_of(turn)]
        answer = ask(cluster, prompt)
        assert answer == generated(prompt)
        cluster.until(partial(has_ended, cluster, before[0]))
        now = [landing_bytes(cluster, source) for source in ("sent", "held")]
        seen.append((now[0] - before[0], now[1] - before[1], len(said)))
        said = [*prompt, *answer]
    return seen


def has_ended(cluster: Any, n_sent: int) -> bool:
    """Return whether prefill has counted another prompt, which sends one block at the least."""
    return landing_bytes(cluster, "sent") > n_sent


def test_each_turn_sends_what_decode_does_not_have(
    start_cluster: StartCluster, tiny_model: Path, generated: Generate, block_bytes: int
) -> None:
    extra = {"prefill": FP32, "decode": FP32}
    with start_cluster(str(tiny_model), n_prefill=2, extra=extra) as cluster:
        for turn, (sent, held, n_before) in enumerate(converse(cluster, generated, 5)):
            n_blocks = -(-(n_before + len(message_of(turn))) // BLOCK)
            n_held = max(0, n_before - 1) // BLOCK  # the last token was never run
            assert (sent, held) == ((n_blocks - n_held) * block_bytes, n_held * block_bytes)


def test_a_pool_too_small_for_a_conversation_costs_no_token(
    start_cluster: StartCluster, tiny_model: Path, generated: Generate, block_bytes: int
) -> None:
    """Pages for one request of its last turn: others between two turns take them."""
    n_pages = 26
    mib = str(-(-n_pages * block_bytes // (1 << 20)))
    extra = {"prefill": FP32, "decode": [*FP32, "--pool-mib", mib]}
    with start_cluster(str(tiny_model), extra=extra) as cluster:
        first = converse(cluster, generated, 3)
        assert all(held for _, held, n_before in first if n_before)
        n_tokens = (int(mib) << 20) // block_bytes * BLOCK - N_NEW
        other = [5 + (i * 31) % 300 for i in range(n_tokens)]
        assert ask(cluster, other) == generated(other)
        again = converse(cluster, generated, 3)
        assert again[0][1] == 0, "the first turn is still there: the pool is too large"
        assert [held for _, held, _ in again[1:]] == [held for _, held, _ in first[1:]]
