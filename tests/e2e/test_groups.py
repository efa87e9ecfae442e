"""A group of prefill workers as real processes: activations over shared memory, ZeroMQ between."""

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from halfmoon_cli.up.embedded_cluster import ProcessSpec, ServiceProcess
from halfmoon_testing.models.tiny_models import make_tiny_model

pytestmark = pytest.mark.e2e

Generate = Callable[[Sequence[int], int], list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, which two and three stages divide."""
    folder = tmp_path_factory.mktemp("six-layers")
    return make_tiny_model("qwen3", folder, fields={"num_hidden_layers": 6})


@pytest.fixture(scope="module")
def generate(model: Path) -> Generate:
    """What transformers itself says."""
    alone: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    alone.generation_config.eos_token_id = None

    def tokens(prompt: Sequence[int], n_new: int) -> list[int]:
        out = alone.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=n_new, pad_token_id=0
        )
        return [int(token) for token in out[0, len(prompt) :]]

    return tokens


@pytest.fixture(scope="module", params=[2, 3])
def cluster(
    request: pytest.FixtureRequest, start_cluster: Callable[..., Any], model: Path
) -> Iterator[Any]:
    size = request.param
    both = ["--dtype", "float32", "--block-size", "16"]
    extra = {"prefill": [*both, "--group-chunk-tokens=64", "--no-measure"], "decode": both}
    with start_cluster(str(model), n_prefill=size, group_size=size, extra=extra) as live:
        yield live


def prompt_of(n: int, first: int) -> list[int]:
    return [first, *(10 + (i * 37) % 300 for i in range(n - 1))]


def n_shares(process: ServiceProcess) -> int:
    """How many shares of prompts a member has computed."""
    page = httpx.get(f"{process.status['operators']}/metrics", timeout=10).text
    families = text_string_to_metric_families(page)
    samples = [each for family in families for each in family.samples]
    return sum(int(s.value) for s in samples if s.name == "halfmoon_prefill_shares_total")


def ask(cluster: Any, prompt: Sequence[int], n_new: int) -> list[int]:
    body = {"prompt": prompt, "max_tokens": n_new, "temperature": 0, "ignore_eos": True}
    (choice,) = cluster.complete(**body, return_token_ids=True)["choices"]
    return list(choice["token_ids"])


def test_long_prompts_are_computed_in_stages_cold_and_cached(
    cluster: Any, generate: Generate
) -> None:
    last = f"prefill-{cluster.cluster.plan.n_prefill - 1}"
    for n_tokens in (500, 1000):
        prompt = prompt_of(n_tokens, 7)
        before = n_shares(cluster.process(last))
        assert ask(cluster, prompt, 12) == generate(prompt, 12)
        assert n_shares(cluster.process(last)) > before
        assert ask(cluster, prompt, 12) == generate(prompt, 12)
        longer = [*prompt, *prompt_of(400, 8)]  # its cached prefix is read by each stage
        assert ask(cluster, longer, 12) == generate(longer, 12)


def test_prompts_of_all_lengths_share_the_members(cluster: Any, generate: Generate) -> None:
    prompts = [prompt_of(n, 20 + i) for i, n in enumerate((700, 5, 900, 40, 17, 600))]
    with ThreadPoolExecutor(len(prompts)) as clients:
        found = list(clients.map(lambda prompt: ask(cluster, prompt, 8), prompts))
    assert found == [generate(prompt, 8) for prompt in prompts]


@contextmanager
def member(cluster: Any, name: str, *flags: str) -> Iterator[ServiceProcess]:
    """One prefill worker more, for the length of a block."""
    plan, folder = cluster.cluster.plan, cluster.cluster.folder
    common = ["--metadata", plan.metadata_url, "--model", plan.model, "--host", plan.host]
    named = ["--served-model-name", plan.served_model_name, "--worker-id", name]
    arguments = (*common, *named, *plan.extra["prefill"], *flags)
    process = ServiceProcess(ProcessSpec(name, "prefill", arguments), folder)
    try:
        yield process
    finally:
        process.signal(signal.SIGTERM)
        if not process.wait(30.0):
            process.signal(signal.SIGKILL)


@pytest.mark.parametrize("only", [(), ("--stage-layers-only",)])
def test_a_member_of_more_stages_than_layers_is_refused_by_name_and_the_others_go_on(
    cluster: Any, generate: Generate, only: Sequence[str]
) -> None:
    with member(cluster, "odd", "--group=odd", "--stage=0/7", *only) as odd:
        cluster.until(lambda: odd.exit_code is not None)
        assert odd.exit_code
        assert odd.refusal and "6 layers" in odd.refusal and "at most 6" in odd.refusal
    prompt = prompt_of(40, 60)
    assert ask(cluster, prompt, 4) == generate(prompt, 4)


def test_members_with_half_of_the_layers_compute_long_prompts_beside_a_worker_with_all(
    start_cluster: Callable[..., Any], model: Path, generate: Generate
) -> None:
    both = ["--dtype", "float32", "--block-size", "16"]
    extra = {"prefill": [*both, "--no-measure"], "decode": both}
    parts = ["--group=parts", "--stage-layers-only", "--group-chunk-tokens=64"]
    with (
        start_cluster(str(model), extra=extra) as live,
        member(live, "part-0", *parts, "--stage=0/2") as first,
        member(live, "part-1", *parts, "--stage=1/2") as last,
    ):
        live.until(lambda: {"part-0", "part-1"} <= set(live.live()))
        for n_tokens in (40, 800, 1000):  # a longer one begins with the one before it
            prompt = prompt_of(n_tokens, 70)
            assert ask(live, prompt, 8) == generate(prompt, 8)
        for process, layers in ((first, "0 to 1"), (last, "2 to 5")):
            assert f"layers {layers} of 6 are loaded" in "\n".join(process.last_lines(400))
            assert n_shares(process) > 0


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_member_lost_in_mid_prompt_costs_no_token(
    cluster: Any, generate: Generate, how: signal.Signals
) -> None:
    last = f"prefill-{cluster.cluster.plan.n_prefill - 1}"
    prompt = prompt_of(3000, 40 + int(how))
    n_before = len(cluster.decisions())
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(ask, cluster, prompt, 8)
        cluster.until(lambda: len(cluster.decisions()) > n_before)
        cluster.process(last).signal(how)
        try:
            assert asked.result() == generate(prompt, 8)
        finally:
            cluster.process(last).signal(signal.SIGCONT)
    if how is signal.SIGSTOP:
        cluster.until(lambda: last in cluster.live())
