"""Processes that die, hang or are started again while a worker changes its role."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.e2e.redis_server import RedisServer
from tests.e2e.role_clients import (
    FLEXIBLE,
    BrokenStream,
    Transformers,
    members_of,
    metrics,
    order_role,
    prompt_of,
    stream,
    workers,
)
from tests.installed_programs import needs_programs

pytestmark = [
    pytest.mark.e2e,
    needs_programs("redis-server"),
]

#: Tokens of answers that keep their worker for seconds.
N_LONG = 3000
N_CLIENTS = 2


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
def shared(start_cluster: Callable[..., Any], model: Path, redis: RedisServer) -> Iterator[Any]:
    extra = {"prefill": FLEXIBLE, "decode": FLEXIBLE}
    with start_cluster(str(model), n_decode=2, metadata=redis.url, extra=extra) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Any) -> Any:
    """Its two decode workers take requests as such."""
    for name in ("decode-0", "decode-1"):
        if name in members_of(shared, "prefill"):
            order_role(shared, name, "decode")
        shared.until(lambda name=name: name in members_of(shared, "decode"))
    shared.until(lambda: "prefill-0" in members_of(shared, "prefill"))
    return shared


class LongAnswers:
    """Long answers under way at both decode workers."""

    def __init__(self, cluster: Any, clients: ThreadPoolExecutor) -> None:
        self.prompts = [prompt_of(40, i) for i in range(N_CLIENTS)]
        n_tokens = [0] * N_CLIENTS
        n_before = len(cluster.decisions())

        def ask(i: int) -> list[int]:
            return stream(cluster, self.prompts[i], N_LONG, lambda n: n_tokens.__setitem__(i, n))

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


def wait_until_prefill_knows_all(cluster: Any) -> None:
    """Workers that came back a moment ago are reached without the metadata server after that."""

    def n_looks() -> float:
        found = metrics(cluster, "prefill-0", result="done")
        return found["halfmoon_prefill_member_refreshes_total"]

    enough = n_looks() + 2  # one may be under way
    cluster.until(lambda: n_looks() >= enough)


def require_answers(cluster: Any, alone: Transformers) -> None:
    for salt in (50, 51):
        prompt = prompt_of(200, salt)
        assert stream(cluster, prompt, 12) == alone.generate(prompt, 12)


def test_a_worker_killed_while_it_changes_costs_no_token(
    cluster: Any, clients: ThreadPoolExecutor, alone: Transformers
) -> None:
    answers = LongAnswers(cluster, clients)
    order_role(cluster, answers.worker, "prefill")
    process = cluster.process(answers.worker)
    process.signal(signal.SIGKILL)
    answers.require_all(alone)
    assert process.wait(20)
    cluster.cluster.restart(answers.worker)
    cluster.until(lambda: answers.worker in members_of(cluster, "decode"))  # its service's role
    require_answers(cluster, alone)


def test_a_worker_stopped_while_it_changes_costs_no_token_and_finishes_its_change(
    cluster: Any, clients: ThreadPoolExecutor, alone: Transformers
) -> None:
    answers = LongAnswers(cluster, clients)
    generation = order_role(cluster, answers.worker, "prefill").generation
    process = cluster.process(answers.worker)
    process.signal(signal.SIGSTOP)
    try:
        answers.require_all(alone)
        assert answers.worker not in workers(cluster)
    finally:
        process.signal(signal.SIGCONT)
    cluster.until(lambda: answers.worker in members_of(cluster, "prefill"))
    assert workers(cluster)[answers.worker]["generation"] > generation
    require_answers(cluster, alone)


def test_a_worker_finishes_its_change_while_the_conductor_is_started_again(
    cluster: Any, clients: ThreadPoolExecutor, alone: Transformers
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
    assert workers(cluster)[answers.worker]["generation"] > generation
    cluster.until(lambda: len(workers(cluster)) == 4)
    require_answers(cluster, alone)


def test_a_worker_finishes_its_change_when_an_empty_redis_is_started_again(
    cluster: Any, redis: RedisServer, clients: ThreadPoolExecutor, alone: Transformers
) -> None:
    answers = LongAnswers(cluster, clients)
    wait_until_prefill_knows_all(cluster)
    generation = order_role(cluster, answers.worker, "prefill").generation
    redis.kill()
    answers.require_all(alone)
    cluster.until(lambda: answers.worker not in workers(cluster))  # it waits for the server
    require_answers(cluster, alone)
    redis.start()
    cluster.until(lambda: answers.worker in members_of(cluster, "prefill"))
    assert workers(cluster)[answers.worker]["generation"] > generation
    cluster.until(lambda: len(workers(cluster)) == 4)
    require_answers(cluster, alone)
    assert metrics(cluster, answers.worker)["halfmoon_model_loads_total"] == 1
