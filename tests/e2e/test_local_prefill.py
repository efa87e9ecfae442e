"""Prompts that decode processes prefill by themselves, while the prefill process has others."""

import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.e2e.conftest import GREEDY, LiveCluster, StartCluster

pytestmark = pytest.mark.e2e

N_NEW = 24
#: Most requests at a time.
N_CLIENTS = 32
T = TypeVar("T")


def prompt_of(i: int) -> list[int]:
    """A prefix that half of them have, so that it is cached, and an end of its own."""
    shared = [10 + (k * 37) % 300 for k in range(100 if i % 2 else 0)]
    return [*shared, *(10 + (k * 41 + i * 101) % 300 for k in range(60 + 95 * i))]


def local_prefills(cluster: LiveCluster) -> list[dict[str, Any]]:
    """The placements at decode workers that were to prefill."""
    chosen = [decision["placement"]["chosen"] for decision in cluster.decisions()]
    return [each for each in chosen if each["worker_id"].startswith("decode")]


def ask_until_one_is_local(
    cluster: LiveCluster, clients: ThreadPoolExecutor, ask: Callable[[int], T]
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
    start_cluster: StartCluster, tiny_model: Path, alone: Any
) -> None:
    """Prompts of any length, in parts beside the batch, with and without a cached prefix."""
    fp32 = ["--dtype", "float32", "--block-size", "16"]
    hybrid = ["--local-prefill-tokens", str(2**31 - 1), "--local-prefill-tbt-s", "0.2"]
    extra = {"prefill": fp32, "decode": [*fp32, *hybrid], "conductor": ["--tbt-slo-s", "30"]}
    with (
        start_cluster(str(tiny_model), extra=extra) as cluster,
        ThreadPoolExecutor(N_CLIENTS) as clients,
    ):

        def ask(i: int, **how: Any) -> dict[str, Any]:
            body = {"prompt": prompt_of(i % 8), "max_tokens": N_NEW, "logprobs": 2}
            choice = cluster.complete(**body, **{**GREEDY, **how})["choices"][0]
            assert isinstance(choice, dict)
            return choice

        expected = [alone.generate(prompt_of(i), N_NEW) for i in range(8)]
        seeded = [ask(i, temperature=0.9, seed=i) for i in range(8)]  # one after another
        for found in (
            ask_until_one_is_local(cluster, clients, ask),
            list(clients.map(ask, range(8))),
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
