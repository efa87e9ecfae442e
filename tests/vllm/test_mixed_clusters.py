"""Prefill and decode by different engines: same tokens, same blocks, same choices."""

import re
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import LiveCluster
from tests.vllm.conftest import BLOCK_SIZE, prompt_of
from tests.vllm.mixed_cluster import (
    READY_WITHIN_S,
    TORCH,
    VLLM,
    MixedCluster,
    complete,
    join,
    metric,
    mixed_cluster,
    stream,
)

pytestmark = pytest.mark.e2e

Reference = Callable[[str, Sequence[int], int], list[int]]

SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
#: What a client may ask, each with an answer of both engines.
ASKED: dict[str, dict[str, Any]] = {
    "seed": SEEDED,
    "scores": {"logprobs": 3, "prompt_logprobs": 2},
    "bias": {"logit_bias": {"77": 100.0}},
    "penalty": {"presence_penalty": 1.5, "frequency_penalty": 0.5},
}
#: Without a place for white space, of which a model without sense writes as much as it may.
GRAMMAR = r"fine: (yes|no), n: [0-9]{3}"


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, model_of: Callable[[str], Path]
) -> Iterator[LiveCluster]:
    """First torch prefills and vLLM decodes, on 42 pages; `swapped` is the reverse."""
    flags = {"prefill-0": TORCH, "decode-0": (*VLLM, "--pool-mib=1")}
    with mixed_cluster(tmp_path_factory.mktemp("mixed"), model_of("qwen3"), flags) as live:
        yield live


@pytest.fixture(scope="module")
def answers(cluster: LiveCluster) -> dict[str, Any]:
    """Answers while vLLM decodes."""
    return ask_all(cluster)


@pytest.fixture(scope="module")
def failover(cluster: LiveCluster, answers: dict[str, Any]) -> dict[str, Any]:
    """Sampled answers during which vLLM's decode worker is killed, and ones without a fault."""
    prompts = [prompt_of(330, seed) for seed in range(4)]
    whole = [complete(cluster, prompt, 150, **SEEDED)["token_ids"] for prompt in prompts]
    # 42 pages: not room for all of the answers, so that some go to vLLM.
    join(cluster, "decode", (*TORCH, "--pool-mib=1"))
    n_before = len(cluster.decisions())
    seen: list[list[int]] = [[] for _ in prompts]

    def ask(number: int) -> None:
        for part in stream(cluster, prompts[number], 150, **SEEDED):
            seen[number] += part

    with ThreadPoolExecutor(len(prompts)) as clients:
        asked = [clients.submit(ask, number) for number in range(len(prompts))]
        cluster.until(lambda: all(len(tokens) >= 20 for tokens in seen))
        cluster.process("decode-0").signal(signal.SIGKILL)
        for each in asked:
            each.result()
    placed = [each["placement"]["decode"] for each in cluster.decisions()[n_before:]]
    return {"whole": whole, "seen": seen, "placed": placed}


@pytest.fixture(scope="module")
def swapped(cluster: LiveCluster, failover: dict[str, Any]) -> LiveCluster:
    """The cluster, with only vLLM at prefill and only torch at decode."""
    join(cluster, "prefill", VLLM)
    cluster.process("prefill-0").signal(signal.SIGTERM)
    cluster.until(lambda: cluster.live() == ["decode-1", "kvstore-0", "prefill-1"])
    return cluster


def ask_all(cluster: LiveCluster) -> dict[str, Any]:
    given = {name: complete(cluster, prompt_of(90), 12, **asked) for name, asked in ASKED.items()}
    body = {
        "model": cluster.model,
        "messages": [{"role": "user", "content": "Is it fine?"}],
        "max_tokens": 60,
        "temperature": 0,
        "structured_outputs": {"regex": GRAMMAR},
    }
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return {**given, "grammar": answer.json()["choices"][0]["message"]["content"]}


def placed(cluster: LiveCluster) -> tuple[str, str]:
    placement = cluster.decisions()[-1]["placement"]
    return placement["chosen"]["worker_id"], placement["decode"]


def test_torch_prefills_and_vllm_decodes(cluster: LiveCluster, reference: Reference) -> None:
    for n in (1, 33, 300):
        assert complete(cluster, prompt_of(n), 10)["token_ids"] == reference(
            "qwen3", prompt_of(n), 10
        )
        assert placed(cluster) == ("prefill-0", "decode-0")


def test_too_small_a_pool_costs_no_token(cluster: LiveCluster, reference: Reference) -> None:
    prompts = [prompt_of(90, seed) for seed in range(4)]
    with ThreadPoolExecutor(len(prompts)) as clients:
        found = list(clients.map(lambda prompt: complete(cluster, prompt, 500), prompts))
    assert [each["token_ids"] for each in found] == [reference("qwen3", p, 500) for p in prompts]
    preempted = 'halfmoon_decode_failures_total{reason="preempted"}'
    assert metric(cluster.process("decode-0"), preempted) > 0


def test_a_killed_decode_worker_costs_no_token_of_a_drawn_answer(failover: dict[str, Any]) -> None:
    assert "decode-0" in failover["placed"][:4]
    assert len(failover["placed"]) > 4  # those there were placed again
    assert all(len(tokens) == 150 for tokens in failover["whole"])
    assert failover["seen"] == failover["whole"]


def test_vllm_prefills_and_torch_decodes(swapped: LiveCluster, reference: Reference) -> None:
    for n in (1, 33, 310):
        assert complete(swapped, prompt_of(n, 9), 10)["token_ids"] == reference(
            "qwen3", prompt_of(n, 9), 10
        )
        assert placed(swapped) == ("prefill-1", "decode-1")


def test_blocks_that_torch_stored_are_a_cached_prefix_of_vllm(
    swapped: LiveCluster, reference: Reference
) -> None:
    longer = [*prompt_of(300), *prompt_of(20, 3)]
    found = complete(swapped, longer, 10)
    assert found["token_ids"] == reference("qwen3", longer, 10)
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 300 // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("asked", [*ASKED, "grammar"])
def test_choices_and_scores_are_those_of_torch(
    asked: str, answers: dict[str, Any], swapped_answers: dict[str, Any]
) -> None:
    ours, theirs = answers[asked], swapped_answers[asked]
    if asked == "grammar":
        assert re.fullmatch(GRAMMAR, ours)
        assert ours == theirs
        return
    assert ours["token_ids"] == theirs["token_ids"]
    assert len(ours["token_ids"]) == 12
    if asked == "bias":
        assert ours["token_ids"] == [77] * 12
    if asked == "scores":
        assert scores_of(ours) == pytest.approx(scores_of(theirs), abs=1e-4)
        assert len(scores_of(ours)) > 100


def test_a_worker_of_another_layout_is_refused(
    swapped: LiveCluster, model_of: Callable[[str], Path]
) -> None:
    flags = (*VLLM, f"--model={model_of('llama')}", "--block-size=64", "--dtype=bfloat16")
    assert isinstance(swapped.cluster, MixedCluster)
    process = swapped.process(swapped.cluster.add("decode", flags))
    swapped.until(lambda: process.exit_code is not None, READY_WITHIN_S)
    said = "\n".join(line for line in process.last_lines(60) if "KV layouts differ" in line)
    for field, here, there in (
        ("block_size", BLOCK_SIZE, 64),
        ("dtype", "'float32'", "'bfloat16'"),
    ):
        assert f"{field} is {here} at the cluster, {there} at decode-2" in said, (
            process.last_lines()
        )
    assert "model is '" in said
    assert swapped.live() == ["decode-1", "kvstore-0", "prefill-1"]


@pytest.fixture(scope="module")
def swapped_answers(swapped: LiveCluster) -> dict[str, Any]:
    return ask_all(swapped)


def scores_of(choice: dict[str, Any]) -> list[float]:
    """All log probabilities of an answer and of its prompt, by token."""
    of_prompt = [
        each["logprob"]
        for place in choice["prompt_logprobs"]
        for _, each in sorted((place or {}).items())
    ]
    return [*choice["logprobs"]["token_logprobs"], *of_prompt]
