"""Long prompts and answers that make room for another tenant lose nothing by it."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from halfmoon_conductor.tenants import add_tenant

pytestmark = pytest.mark.e2e

#: Its tokens depend on every byte of KV; a step takes 10 ms, and 2 ms more for each token.
MODEL = "fake://shares?step_s=0.01&token_s=0.002&max_context=4096"
N_LONG, N_SHORT = 600, 4
#: Prefilled in 6 s.
N_LONG_PROMPT = 3000
#: Answers at decode at once: the flood's.
N_RUNNING = 3


def prompt_of(number: int, n_tokens: int = 20) -> list[int]:
    return [10 + (i * 37 + number * 101) % 300 for i in range(n_tokens)]


def stream_tokens(live: Any, key: str, prompt: list[int], n_new: int) -> Iterator[int]:
    body = {
        "model": live.model,
        "prompt": prompt,
        "max_tokens": n_new,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    headers = {"authorization": f"Bearer {key}"}
    url = f"{live.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=240) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield from choice.get("token_ids") or ()


def metric(live: Any, name: str, **labels: str) -> int:
    key = {"authorization": f"Bearer {live.key}"}
    page = httpx.get(f"{live.url}/metrics", headers=key, timeout=10).raise_for_status().text
    return sum(
        int(sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def n_stopped(live: Any) -> int:
    return metric(live, "halfmoon_requests_stopped_total")


@pytest.fixture
def shared_cluster(
    start_cluster: Callable[..., Any], tmp_path: Path
) -> Iterator[tuple[Any, str, str]]:
    """A decode worker with few places, and the keys of the tenants "flood" and "lab"."""
    tenants = tmp_path / "tenants.toml"
    flood, lab = (add_tenant(tenants, name) for name in ("flood", "lab"))
    operator = add_tenant(tenants, "ops", operator=True)
    extra = {
        "conductor": ["--tenants", str(tenants)],
        "decode": ["--max-running", str(N_RUNNING)],
    }
    with start_cluster(MODEL, key=operator, n_decode=1, extra=extra) as live:
        yield live, flood, lab


def test_a_flood_of_long_answers_makes_room_and_loses_no_token(
    shared_cluster: tuple[Any, str, str],
) -> None:
    live, flood, lab = shared_cluster
    with ThreadPoolExecutor(N_RUNNING) as clients:

        def take(number: int, all_run: Barrier) -> list[int]:
            tokens = []
            for token in stream_tokens(live, flood, prompt_of(number), N_LONG):
                tokens.append(token)
                if len(tokens) == 2:
                    all_run.wait(timeout=120)
            return tokens

        def take_all() -> list["Future[list[int]]"]:
            all_run = Barrier(N_RUNNING + 1)
            long = [clients.submit(take, number, all_run) for number in range(N_RUNNING)]
            all_run.wait(timeout=120)
            return long

        undisturbed = [answer.result(timeout=240) for answer in take_all()]
        assert n_stopped(live) == 0
        long = take_all()
        short = list(stream_tokens(live, lab, prompt_of(9), N_SHORT))
        assert n_stopped(live) >= 1
        assert not any(answer.done() for answer in long), "it waited for an answer's end"
        assert [answer.result(timeout=240) for answer in long] == undisturbed
        assert list(stream_tokens(live, lab, prompt_of(9), N_SHORT)) == short
    assert {len(tokens) for tokens in undisturbed} == {N_LONG}


def test_a_flood_of_long_prompts_makes_room_and_loses_no_token(
    shared_cluster: tuple[Any, str, str],
) -> None:
    live, flood, lab = shared_cluster

    def ask(number: int) -> list[int]:
        return list(stream_tokens(live, flood, prompt_of(number, N_LONG_PROMPT), N_SHORT))

    with ThreadPoolExecutor(N_RUNNING) as clients:
        long = [clients.submit(ask, number) for number in range(N_RUNNING)]
        live.until(lambda: metric(live, "halfmoon_requests", phase="prefilling") == N_RUNNING)
        short = list(stream_tokens(live, lab, prompt_of(9), N_SHORT))
        assert n_stopped(live) >= 1
        assert not any(answer.done() for answer in long), "it waited for an answer's end"
        tokens = [answer.result(timeout=240) for answer in long]
    assert [ask(number) for number in range(N_RUNNING)] == tokens
    assert list(stream_tokens(live, lab, prompt_of(9), N_SHORT)) == short
    assert {len(each) for each in tokens} == {N_SHORT}
