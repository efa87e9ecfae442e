"""Processes that die, hang or are started again while a worker changes its role."""

import asyncio
import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from halfmoon_cli.__main__ import app
from halfmoon_cli.up.embedded_cluster import ClusterPlan
from halfmoon_metadata import open_store
from halfmoon_protocol.ids import ConductorId, WorkerId
from halfmoon_protocol.messages import ChangeRole, Hello, Role, Welcome, WorkerInfo
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.membership import list_members
from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.e2e.conftest import BrokenStream, LiveCluster, StartCluster
from tests.e2e.redis_server import RedisServer
from tests.e2e.transformers_alone import Transformers
from tests.installed_programs import needs_programs

pytestmark = [
    pytest.mark.e2e,
    needs_programs("redis-server"),
]

#: Flags of a worker that changes whenever a conductor says so.
FLEXIBLE = [
    *("--dtype", "float32", "--block-size", "16", "--pool-mib", "32", "--no-measure"),
    *("--roles", "prefill,decode", "--role-cooldown-s", "0", "--drain-s", "120"),
]
#: Tokens of answers that keep their worker for seconds.
N_LONG = 3000
N_CLIENTS = 2


def prompt_of(n: int, salt: int) -> list[int]:
    """A prompt that shares no block with one of another salt."""
    return [11 + salt % 300, 11 + salt // 300, *(10 + (i * 37) % 300 for i in range(n - 2))]


def members_of(cluster: LiveCluster, role: str) -> set[str]:
    """Workers that the conductor sends requests of this role."""
    there = cluster.workers().values()
    return {w["worker_id"] for w in there if w["role"] == role and not w["draining"]}


def order_role(cluster: LiveCluster, worker_id: str, role: Role) -> WorkerInfo:
    """Order a change as a further conductor would; return the record once the worker drains."""
    return asyncio.run(_order_role(cluster.cluster.plan, WorkerId(worker_id), role))


async def _order_role(plan: ClusterPlan, worker_id: WorkerId, role: Role) -> WorkerInfo:
    store = open_store(plan.metadata_url)
    network = ZmqNetwork()
    try:
        info = (await list_members(store))[worker_id]
        link = await network.dial(info.commands, info.events, key_id=info.key_id)
        link.send_now(Hello(conductor_id=ConductorId("another"), session=1))
        link.send_now(ChangeRole(role=role, reason="a test"))
        async with asyncio.timeout(60):
            while True:
                message = await link.receive()
                if isinstance(message, Welcome) and message.worker.draining:
                    return message.worker
    finally:
        await network.close()
        store.close()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So many layers that a step takes milliseconds."""
    folder = tmp_path_factory.mktemp("layers")
    return make_tiny_model("qwen3", folder, fields={"num_hidden_layers": 24})


@pytest.fixture(scope="module")
def alone(model: Path) -> Transformers:
    return Transformers(model)


@pytest.fixture(scope="module")
def shared(start_cluster: StartCluster, model: Path, redis: RedisServer) -> Iterator[LiveCluster]:
    extra = {"prefill": FLEXIBLE, "decode": FLEXIBLE}
    with start_cluster(str(model), n_decode=2, metadata=redis.url, extra=extra) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: LiveCluster) -> LiveCluster:
    """Its two decode workers take requests as such."""
    for name in ("decode-0", "decode-1"):
        if name in members_of(shared, "prefill"):
            order_role(shared, name, "decode")
        shared.until(lambda name=name: name in members_of(shared, "decode"))
    shared.until(lambda: "prefill-0" in members_of(shared, "prefill"))
    return shared


class LongAnswers:
    """Long answers under way at both decode workers."""

    def __init__(self, cluster: LiveCluster, clients: ThreadPoolExecutor) -> None:
        self.prompts = [prompt_of(40, i) for i in range(N_CLIENTS)]
        n_tokens = [0] * N_CLIENTS
        n_before = len(cluster.decisions())

        def ask(i: int) -> list[int]:
            return cluster.stream(self.prompts[i], N_LONG, lambda n: n_tokens.__setitem__(i, n))

        self.asked: list[Future[list[int]]] = [clients.submit(ask, i) for i in range(N_CLIENTS)]
        cluster.until(lambda: min(n_tokens) > 10)
        decisions = cluster.decisions()[n_before:]
        #: A worker that has one of them.
        self.worker = str(decisions[-1]["placement"]["decode"])

    def require_all(self, alone: Transformers) -> None:
        """Each is what transformers says, each token once."""
        for prompt, asked in zip(self.prompts, self.asked, strict=True):
            alone.require_greedy(prompt, asked.result(timeout=150), N_LONG)


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(N_CLIENTS) as pool:
        yield pool


def wait_until_prefill_knows_all(cluster: LiveCluster) -> None:
    """Workers that came back a moment ago are reached without the metadata server after that."""

    def n_looks() -> float:
        found = cluster.metrics("prefill-0", result="done")
        return found["halfmoon_prefill_member_refreshes_total"]

    enough = n_looks() + 2  # one may be under way
    cluster.until(lambda: n_looks() >= enough)


def require_answers(cluster: LiveCluster, alone: Transformers) -> None:
    for salt in (50, 51):
        prompt = prompt_of(200, salt)
        assert cluster.stream(prompt, 12) == alone.generate(prompt, 12)


def test_a_worker_stopped_while_it_changes_costs_no_token_and_finishes_its_change(
    cluster: LiveCluster, clients: ThreadPoolExecutor, alone: Transformers
) -> None:
    answers = LongAnswers(cluster, clients)
    generation = order_role(cluster, answers.worker, "prefill").generation
    process = cluster.process(answers.worker)
    process.signal(signal.SIGSTOP)
    try:
        answers.require_all(alone)
        assert answers.worker not in cluster.workers()
    finally:
        process.signal(signal.SIGCONT)
    cluster.until(lambda: answers.worker in members_of(cluster, "prefill"))
    assert cluster.workers()[answers.worker]["generation"] > generation
    require_answers(cluster, alone)


def test_a_worker_finishes_its_change_while_the_conductor_is_started_again(
    cluster: LiveCluster, clients: ThreadPoolExecutor, alone: Transformers
) -> None:
    answers = LongAnswers(cluster, clients)
    generation = order_role(cluster, answers.worker, "prefill").generation
    conductor = cluster.process("conductor-0")
    conductor.signal(signal.SIGKILL)
    assert conductor.wait(20)
    for asked in answers.asked:  # its requests were in its memory alone
        with pytest.raises(BrokenStream):
            asked.result(timeout=60)
    cluster.cluster.restart("conductor-0")
    cluster.until(lambda: answers.worker in members_of(cluster, "prefill"))
    assert cluster.workers()[answers.worker]["generation"] > generation
    cluster.until(lambda: len(cluster.workers()) == 4)
    require_answers(cluster, alone)


def test_a_worker_finishes_its_change_when_an_empty_redis_is_started_again(
    cluster: LiveCluster, redis: RedisServer, clients: ThreadPoolExecutor, alone: Transformers
) -> None:
    answers = LongAnswers(cluster, clients)
    wait_until_prefill_knows_all(cluster)
    generation = order_role(cluster, answers.worker, "prefill").generation
    redis.kill()
    answers.require_all(alone)
    cluster.until(lambda: answers.worker not in cluster.workers())  # it waits for the server
    require_answers(cluster, alone)
    redis.start()
    cluster.until(lambda: answers.worker in members_of(cluster, "prefill"))
    assert cluster.workers()[answers.worker]["generation"] > generation
    cluster.until(lambda: len(cluster.workers()) == 4)
    require_answers(cluster, alone)
    assert cluster.metrics(answers.worker)["halfmoon_model_loads_total"] == 1


def test_an_operator_changes_a_role_by_command_and_the_last_worker_of_one_keeps_its_own(
    cluster: LiveCluster, alone: Transformers
) -> None:
    def roles(*words: str) -> Result:
        return CliRunner().invoke(app, ["roles", "--url", cluster.url, *words])

    done = roles("set", "decode-1", "prefill")
    assert done.exit_code == 0, done.output
    assert "decode-1 is pinned to prefill" in done.output and "set decode-1 auto" in done.output
    cluster.until(lambda: "decode-1" in members_of(cluster, "prefill"))
    shown = roles().output
    (line,) = [line for line in shown.splitlines() if line.startswith("decode-1 ")]
    assert line.split()[:5] == ["decode-1", "prefill", "prefill,", "decode", "prefill"]
    assert "role_changes is off" in shown
    for worker, told in (("decode-0", "the last decode worker"), ("decode-7", "'decode-7'")):
        refused = roles("set", worker, "prefill")
        assert refused.exit_code == 1 and told in refused.stderr and "--url" not in refused.stderr
    row = json.loads(roles("set", "decode-1", "auto", "--json").stdout)["worker"]
    assert (row["role"], row["pinned"]) == ("prefill", None)
    require_answers(cluster, alone)
