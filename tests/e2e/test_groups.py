"""A group of prefill workers as real processes: activations over shared memory, ZeroMQ between."""

import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from halfmoon_cli.up.embedded_cluster import ProcessSpec, ServiceProcess
from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.e2e.conftest import LiveCluster, StartCluster
from tests.e2e.transformers_alone import Transformers

pytestmark = pytest.mark.e2e

FP32 = ["--dtype", "float32", "--block-size", "16"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, which two and three stages divide."""
    folder = tmp_path_factory.mktemp("six-layers")
    return make_tiny_model("qwen3", folder, fields={"num_hidden_layers": 6})


@pytest.fixture(scope="module")
def whole(model: Path) -> Transformers:
    return Transformers(model)


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster, model: Path) -> Iterator[LiveCluster]:
    """Two stages; tests/services/test_groups.py has three, too."""
    extra = {"prefill": [*FP32, "--group-chunk-tokens=64", "--no-measure"], "decode": FP32}
    extra["conductor"] = ["--group-least-gain=1"]  # whatever a busy machine makes of predictions
    with start_cluster(str(model), n_prefill=2, group_size=2, extra=extra) as live:
        yield live


def prompt_of(n: int, first: int) -> list[int]:
    return [first, *(10 + (i * 37) % 300 for i in range(n - 1))]


def n_shares(process: ServiceProcess) -> int:
    """How many shares of prompts a member has computed."""
    page = httpx.get(f"{process.status['operators']}/metrics", timeout=10).text
    found = re.findall(r"^halfmoon_prefill_shares_total\S* (\S+)", page, re.M)
    return int(sum(map(float, found)))


def require(cluster: LiveCluster, whole: Transformers, prompt: Sequence[int], n_new: int) -> None:
    assert cluster.ask(prompt, n_new)[0] == whole.generate(prompt, n_new)


def test_long_prompts_are_computed_in_stages_cold_and_cached(
    cluster: LiveCluster, whole: Transformers
) -> None:
    for n_tokens in (500, 1000):
        prompt = prompt_of(n_tokens, 7)
        before = n_shares(cluster.process("prefill-1"))
        require(cluster, whole, prompt, 12)
        assert n_shares(cluster.process("prefill-1")) > before
        require(cluster, whole, prompt, 12)
        longer = [*prompt, *prompt_of(400, 8)]  # its cached prefix is read by each stage
        require(cluster, whole, longer, 12)


@contextmanager
def member(cluster: LiveCluster, name: str, *flags: str) -> Iterator[ServiceProcess]:
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


def test_a_member_of_more_stages_than_layers_is_refused_by_name_and_the_others_go_on(
    cluster: LiveCluster, whole: Transformers
) -> None:
    with member(cluster, "odd", "--group=odd", "--stage=0/7") as odd:
        cluster.until(lambda: odd.exit_code is not None)
        assert odd.exit_code
        assert odd.refusal and "6 layers" in odd.refusal and "at most 6" in odd.refusal
    require(cluster, whole, prompt_of(40, 60), 4)


def test_members_with_half_of_the_layers_compute_long_prompts_beside_a_worker_with_all(
    start_cluster: StartCluster, model: Path, whole: Transformers
) -> None:
    extra = {"prefill": [*FP32, "--no-measure"], "decode": FP32}
    parts = ["--group=parts", "--stage-layers-only", "--group-chunk-tokens=64"]
    with (
        start_cluster(str(model), extra=extra) as live,
        member(live, "part-0", *parts, "--stage=0/2") as first,
        member(live, "part-1", *parts, "--stage=1/2") as last,
    ):
        live.until(lambda: {"part-0", "part-1"} <= set(live.live()))
        for n_tokens in (40, 800, 1000):  # a longer one begins with the one before it
            require(live, whole, prompt_of(n_tokens, 70), 8)
        for process, layers in ((first, "0 to 1"), (last, "2 to 5")):
            assert f"layers {layers} of 6 are loaded" in "\n".join(process.last_lines(400))
            assert n_shares(process) > 0


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_member_lost_in_mid_prompt_costs_no_token(
    cluster: LiveCluster, whole: Transformers, how: signal.Signals
) -> None:
    last = "prefill-1"
    prompt = prompt_of(3000, 40 + int(how))
    n_before = len(cluster.decisions())
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(cluster.ask, prompt, 8)
        cluster.until(lambda: len(cluster.decisions()) > n_before)
        cluster.process(last).signal(how)
        try:
            assert asked.result()[0] == whole.generate(prompt, 8)
        finally:
            cluster.process(last).signal(signal.SIGCONT)
    if how is signal.SIGSTOP:
        cluster.until(lambda: last in cluster.live())
