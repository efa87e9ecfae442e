"""Workers as real processes change between prefill and decode as the load shifts."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import LiveCluster, StartCluster
from tests.e2e.role_clients import (
    FLEXIBLE,
    members_of,
    prompt_of,
    require_one_load,
)

pytestmark = pytest.mark.e2e


class Clients:
    """Clients that ask one request after another, each of the kind that is wanted then."""

    def __init__(self, cluster: LiveCluster, n: int, kind: tuple[int, int]) -> None:
        self.cluster = cluster
        #: Tokens of the prompts, and of the answers, from now on.
        self.kind = kind
        #: Prompt, tokens wanted and tokens got of each request.
        self.answers: list[tuple[list[int], int, list[int]]] = []
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(n)
        self._running: list[Future[None]] = [self._pool.submit(self._ask, i) for i in range(n)]

    def _ask(self, client: int) -> None:
        turn = 0
        while not self._stopping.is_set():
            turn += 1
            n_prompt, n_new = self.kind
            # Prompts of long answers are cached after the first, and short answers' are new.
            is_long = n_new > 10
            salt = client % 4 if is_long else 1000 + 16 * turn + client
            n_new += 7 * client if is_long else 0
            prompt = prompt_of(n_prompt, salt)
            self.answers.append((prompt, n_new, self.cluster.stream(prompt, n_new)))

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Let each client finish its request; if the test has failed, that is what is said."""
        self._stopping.set()
        if kind is None:
            for each in self._running:
                each.result(timeout=200)
        self._pool.shutdown(wait=kind is None)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while all clients go on."""

        def is_met() -> bool:
            failed = [each.exception() for each in self._running if each.done()]
            assert not failed, failed
            return condition()

        self.cluster.until(is_met, 240.0)


def test_the_conductor_changes_roles_both_ways_as_the_load_shifts_and_no_token_is_lost(
    start_cluster: StartCluster, tiny_model: Path, alone: Any
) -> None:
    policy = ["--role-changes", "--role-lasting-s", "1", "--role-rest-s", "1"]
    # Any running answer is a load at decode, and any prompt that waits one at prefill.
    limits = ["--admission", "none", "--ttft-slo-s", "5e-4", "--tbt-slo-s", "1e-4"]
    extra = {
        "conductor": [*policy, *limits],
        "prefill": FLEXIBLE,
        "decode": FLEXIBLE,
    }
    with start_cluster(str(tiny_model), n_prefill=2, n_decode=1, extra=extra) as cluster:
        before = {name: worker["generation"] for name, worker in cluster.workers().items()}
        with Clients(cluster, 8, (60, 300)) as clients:
            clients.until(lambda: len(members_of(cluster, "decode")) == 2)
            (to_decode,) = members_of(cluster, "decode") - {"decode-0"}
            there, n_answers = members_of(cluster, "prefill"), len(clients.answers)
            clients.kind = (600, 4)
            clients.until(lambda: len(members_of(cluster, "prefill")) == 2)
            (to_prefill,) = members_of(cluster, "prefill") - there
            clients.until(lambda: len(clients.answers) > n_answers + 30)
        after = {name: worker["generation"] for name, worker in cluster.workers().items()}
        n_changes = {name: [to_decode, to_prefill].count(name) for name in (to_decode, to_prefill)}
        for name, n in n_changes.items():
            assert after[name] == before[name] + n
            require_one_load(cluster, name, n)
    required = set()
    for prompt, n_new, tokens in clients.answers:
        if (*prompt, n_new, *tokens) not in required:  # clients repeat their prompts
            alone.require_greedy(prompt, tokens, n_new)
            required.add((*prompt, n_new, *tokens))
    prompt, n_new, tokens = clients.answers[-1]
    assert tokens == alone.generate(prompt, n_new)
