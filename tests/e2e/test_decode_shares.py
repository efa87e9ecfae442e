"""Long prompts and answers that make room for another tenant lose nothing by it."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from halfmoon_conductor.tenants import add_tenant
from tests.e2e.conftest import LiveCluster, StartCluster, once

pytestmark = pytest.mark.e2e

#: Its tokens depend on every byte of KV; a step takes 10 ms, and 2 ms more for each token.
MODEL = "fake://shares?step_s=0.01&token_s=0.002&max_context=4096"
N_LONG, N_SHORT = 600, 4
#: Prefilled in 4 s.
N_LONG_PROMPT = 2000
#: Answers at decode at once: the flood's.
N_RUNNING = 3


def prompt_of(number: int, n_tokens: int = 20) -> list[int]:
    return [10 + (i * 37 + number * 101) % 300 for i in range(n_tokens)]


def ask(live: LiveCluster, key: str, prompt: list[int], n_new: int, **more: Any) -> list[int]:
    """The tokens of a stream of a tenant."""
    return LiveCluster(live.cluster, key).stream(prompt, n_new, model="shares", **more)


def n_stopped(live: LiveCluster) -> int:
    return int(live.metrics().get("halfmoon_requests_stopped_total", 0))


@pytest.fixture(scope="module")
def shared_cluster(
    start_cluster: StartCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LiveCluster, str, str]]:
    """A decode worker with few places, and the keys of the tenants "flood" and "lab"."""
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    flood, lab = (add_tenant(tenants, name) for name in ("flood", "lab"))
    operator = add_tenant(tenants, "ops", operator=True)
    extra = {
        "conductor": ["--tenants", str(tenants)],
        "decode": ["--max-running", str(N_RUNNING)],
    }
    with start_cluster(MODEL, key=operator, n_decode=1, extra=extra) as live:
        yield live, flood, lab


def test_a_flood_of_long_answers_makes_room_and_loses_no_token(
    shared_cluster: tuple[LiveCluster, str, str],
) -> None:
    live, flood, lab = shared_cluster
    n_before = n_stopped(live)
    with ThreadPoolExecutor(N_RUNNING) as clients:

        def take(number: int, all_run: Barrier) -> list[int]:
            note = once(2, lambda: all_run.wait(timeout=120))
            return ask(live, flood, prompt_of(number), N_LONG, on_tokens=note)

        def take_all() -> list["Future[list[int]]"]:
            all_run = Barrier(N_RUNNING + 1)
            long = [clients.submit(take, number, all_run) for number in range(N_RUNNING)]
            all_run.wait(timeout=120)
            return long

        undisturbed = [answer.result(timeout=240) for answer in take_all()]
        assert n_stopped(live) == n_before
        long = take_all()
        short = ask(live, lab, prompt_of(9), N_SHORT)
        assert n_stopped(live) > n_before
        assert not any(answer.done() for answer in long), "it waited for an answer's end"
        assert [answer.result(timeout=240) for answer in long] == undisturbed
        assert ask(live, lab, prompt_of(9), N_SHORT) == short
    assert {len(tokens) for tokens in undisturbed} == {N_LONG}


def test_a_flood_of_long_prompts_makes_room_and_loses_no_token(
    shared_cluster: tuple[LiveCluster, str, str],
) -> None:
    live, flood, lab = shared_cluster

    def ask_long(number: int) -> list[int]:
        return ask(live, flood, prompt_of(number, N_LONG_PROMPT), N_SHORT)

    n_before = n_stopped(live)
    with ThreadPoolExecutor(N_RUNNING) as clients:
        long = [clients.submit(ask_long, number) for number in range(N_RUNNING)]
        live.until(lambda: live.metrics(phase="prefilling").get("halfmoon_requests") == N_RUNNING)
        short = ask(live, lab, prompt_of(9), N_SHORT)
        assert n_stopped(live) > n_before
        assert not any(answer.done() for answer in long), "it waited for an answer's end"
        tokens = [answer.result(timeout=240) for answer in long]
    assert [ask_long(number) for number in range(N_RUNNING)] == tokens
    assert ask(live, lab, prompt_of(9), N_SHORT) == short
    assert {len(each) for each in tokens} == {N_SHORT}
