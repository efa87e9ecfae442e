"""Real processes whose keys open one landing or one lease each: nothing else changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from halfmoon_engine.fake_engine import FakeEngine

pytestmark = pytest.mark.e2e

N_NEW = 20
StartCluster = Callable[..., Any]


def ask(cluster: Any, prompt: list[int]) -> tuple[list[int], int]:
    """The answer, and how many tokens of its prompt were cached."""
    said = cluster.complete(
        prompt=prompt, max_tokens=N_NEW, temperature=0, ignore_eos=True, return_token_ids=True
    )
    cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
    return list(said["choices"][0]["token_ids"]), int(cached)


def test_greedy_tokens_are_those_of_transformers_with_keys_for_one_landing_alone(
    start_cluster: StartCluster, tiny_model: Path
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # our requests ignore it
    keys = ["--transfer-backends", "tcp", "--transfer-grants", "on"]
    worker = [*keys, "--dtype", "float32", "--block-size", "16"]
    extra = {"prefill": worker, "decode": [*worker, "--no-keep-pages"], "kvstore": keys}
    with start_cluster(str(tiny_model), extra=extra) as cluster:
        for n_tokens in (5, 100, 300):
            prompt = [10 + (i * 37 + n_tokens) % 300 for i in range(n_tokens)]
            out = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=N_NEW, pad_token_id=0
            )
            expected = out[0, n_tokens:].tolist()
            assert ask(cluster, prompt)[0] == expected
            if n_tokens > 16:  # blocks that a kvstore lends, once the conductor knows of them
                cluster.until(lambda prompt=prompt: ask(cluster, prompt)[1] > 0)
                assert ask(cluster, prompt)[0] == expected


def test_without_a_setting_landings_have_keys_once_no_prefill_worker_shares_their_host(
    start_cluster: StartCluster,
) -> None:
    prompt = list(range(100))

    def own_keys(cluster: Any) -> bool:
        """Whether decode has said so last; it begins without."""
        lines = cluster.process("decode-0").last_lines(200)
        said = [line for line in lines if "landing_keys" in line]
        return bool(said) and "of_their_own=True" in said[-1]

    with start_cluster("fake://", extra={"decode": ["--host-id", "elsewhere"]}) as cluster:
        cluster.until(lambda: own_keys(cluster))
        assert ask(cluster, prompt)[0] == FakeEngine().expected(prompt, N_NEW)
    with start_cluster("fake://") as cluster:
        cluster.until(lambda: not own_keys(cluster))
        assert ask(cluster, prompt)[0] == FakeEngine().expected(prompt, N_NEW)
