"""Prompts that decode processes prefill by themselves, while the prefill process has others."""

import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from halfmoon_engine.fake_engine import FakeEngine, parse_fake_spec

pytestmark = pytest.mark.e2e

N_NEW = 24
#: Most requests at a time.
N_CLIENTS = 32
StartCluster = Callable[..., Any]
T = TypeVar("T")


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


def prompt_of(i: int) -> list[int]:
    """A prefix that all have, so that it is cached, and an end of its own."""
    shared = [10 + (k * 37) % 300 for k in range(100)]
    return [*shared, *(10 + (k * 41 + i * 101) % 300 for k in range(60 + 17 * i))]


def local_prefills(cluster: Any) -> list[dict[str, Any]]:
    """The placements at decode workers that were to prefill."""
    placements = [decision["placement"] for decision in cluster.decisions()]
    return [
        placement["chosen"]
        for placement in placements
        if placement["chosen"]["worker_id"].startswith("decode")
    ]


def ask_until_one_is_local(
    cluster: Any, clients: ThreadPoolExecutor, ask: Callable[[int], T]
) -> list[T]:
    """Ask one request after another while prefill stands still, until decode takes one.

    The measured speeds of both may say anything on a busy machine; the queue grows all the same.
    """
    asked = list[Future[T]]()
    cluster.process("prefill-0").signal(signal.SIGSTOP)
    try:
        while not local_prefills(cluster):
            assert len(asked) < N_CLIENTS, "a queue of any length was preferred"
            n_decided = len(cluster.decisions())
            asked.append(clients.submit(ask, len(asked)))
            cluster.until(lambda: len(cluster.decisions()) > n_decided)  # noqa: B023 -- it waits
    finally:
        cluster.process("prefill-0").signal(signal.SIGCONT)
    return [answer.result(timeout=100) for answer in asked]


def test_answers_are_those_of_transformers_wherever_a_prompt_is_prefilled(
    start_cluster: StartCluster, tiny_model: Path, generated: Callable[[list[int]], list[int]]
) -> None:
    fp32 = ["--dtype", "float32", "--block-size", "16"]
    local = [*fp32, "--local-prefill-tokens", "512"]
    extra = {"prefill": fp32, "decode": local, "conductor": ["--tbt-slo-s", "30"]}
    with (
        start_cluster(str(tiny_model), extra=extra) as cluster,
        ThreadPoolExecutor(N_CLIENTS) as clients,
    ):

        def ask(i: int, **how: Any) -> dict[str, Any]:
            said = cluster.complete(
                prompt=prompt_of(i),
                max_tokens=N_NEW,
                ignore_eos=True,
                return_token_ids=True,
                logprobs=2,
                **how,
            )
            choice = said["choices"][0]
            assert isinstance(choice, dict)
            return choice

        expected = [generated(prompt_of(i)) for i in range(8)]
        seeded = [ask(i, temperature=0.9, seed=i) for i in range(8)]  # one after another
        for found in (
            ask_until_one_is_local(cluster, clients, lambda i: ask(i % 8, temperature=0)),
            list(clients.map(lambda i: ask(i, temperature=0), range(8))),
        ):
            for i, choice in enumerate(found):
                assert choice["token_ids"] == expected[i % 8]
        assert any(chosen["n_blocks"] for chosen in local_prefills(cluster))
        again = list(clients.map(lambda i: ask(i, temperature=0.9, seed=i), range(8)))
        for one, other in zip(seeded, again, strict=True):
            assert one["token_ids"] == other["token_ids"]
            assert one["logprobs"]["token_logprobs"] == pytest.approx(
                other["logprobs"]["token_logprobs"], abs=1e-3
            )


def test_prompts_of_any_length_are_prefilled_beside_the_batch_with_equal_tokens(
    start_cluster: StartCluster, tiny_model: Path, generated: Callable[[list[int]], list[int]]
) -> None:
    fp32 = ["--dtype", "float32", "--block-size", "16"]
    hybrid = ["--local-prefill-tokens", str(2**31 - 1), "--local-prefill-tbt-s", "0.2"]
    extra = {"prefill": fp32, "decode": [*fp32, *hybrid], "conductor": ["--tbt-slo-s", "30"]}
    with (
        start_cluster(str(tiny_model), extra=extra) as cluster,
        ThreadPoolExecutor(N_CLIENTS) as clients,
    ):
        prompts = [[10 + (k * 41 + i * 101) % 300 for k in range(300 + 75 * i)] for i in range(8)]

        def ask(prompt: list[int]) -> list[int]:
            said = cluster.complete(
                prompt=prompt,
                max_tokens=N_NEW,
                ignore_eos=True,
                return_token_ids=True,
                temperature=0,
            )
            return list(said["choices"][0]["token_ids"])

        expected = [generated(prompt) for prompt in prompts]
        found = ask_until_one_is_local(cluster, clients, lambda i: ask(prompts[i % 8]))
        assert found == [expected[i % 8] for i in range(len(found))]
        assert list(clients.map(ask, prompts)) == expected


def test_a_decode_process_killed_in_mid_prefill_costs_no_token(start_cluster: StartCluster) -> None:
    spec = "fake://slow?step_s=0.004&token_s=0.01&max_context=8192"
    oracle = FakeEngine(parse_fake_spec(spec), block_size=64)
    extra = {"decode": ["--local-prefill-tokens", "512"]}
    with (
        start_cluster(spec, n_decode=2, extra=extra) as cluster,
        ThreadPoolExecutor(2) as clients,
    ):

        def ask(prompt: list[int]) -> list[int]:
            said = cluster.complete(
                prompt=prompt, max_tokens=30, temperature=0, return_token_ids=True
            )
            return list(said["choices"][0]["token_ids"])

        long, short = [i % 900 for i in range(1200)], [i % 700 for i in range(400)]
        first = clients.submit(ask, long)  # 12 s of the prefill process, the short one takes 4
        cluster.until(lambda: bool(cluster.decisions()))
        second = clients.submit(ask, short)
        cluster.until(lambda: bool(local_prefills(cluster)))
        cluster.process(local_prefills(cluster)[0]["worker_id"]).signal(signal.SIGKILL)
        assert second.result(timeout=100) == oracle.expected(short, 30)
        assert first.result(timeout=100) == oracle.expected(long, 30)
        assert len(cluster.decisions()) >= 3, "the short prompt was placed again"
