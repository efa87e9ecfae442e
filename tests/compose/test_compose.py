"""Containers, from outside: what clients see while parts of the cluster come and go.

The tests share one cluster and run in their order.
"""

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import OpenAI

pytestmark = pytest.mark.timeout(2400)

N_NEW = 24
#: So many that something can be done before they are there.
N_LONG = 3000
ROLES = ("conductor", "prefill", "decode", "kvstore-0", "kvstore-1")


def prompt(seed: int, length: int = 700) -> list[int]:
    """Token ids of a prompt that no other test has."""
    return [37 + (7 * i + 911 * seed) % 1009 for i in range(length)]


@pytest.fixture(scope="module")
def expected(compose: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """What `transformers.generate` makes of the model that the containers serve."""
    torch = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    prefill = compose.containers("prefill")[0]
    compose.docker("cp", f"{prefill.name}:/usr/share/halfmoon/demo", str(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "demo")
    # As ignore_eos has it.
    model.generation_config.eos_token_id = None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "demo")

    def text(prompt: list[int], n_new: int = N_NEW) -> str:
        with torch.no_grad():
            made = model.generate(torch.tensor([prompt]), max_new_tokens=n_new, do_sample=False)
        return str(tokenizer.decode(made[0][len(prompt) :], skip_special_tokens=True))

    return text


def text_of(completion: dict[str, Any]) -> str:
    return str(completion["choices"][0]["text"])


def test_images_of_services_without_a_model_hold_no_torch(compose: Any) -> None:
    for service in ("conductor", "kvstore-0"):
        found = compose.containers(service)[0].execute(
            "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))"
        )
        assert found.strip() == "None"


def test_services_run_as_nobody_in_particular_and_can_not_write_their_image(compose: Any) -> None:
    for role in ROLES:
        container = compose.containers(role)[0]
        assert container.execute("id", "-u").strip() == "10001"
        with pytest.raises(AssertionError, match="Read-only file system"):
            container.execute("touch", "/opt/halfmoon/x")


def test_the_first_start_makes_a_key_that_only_services_can_read(compose: Any) -> None:
    assert len(compose.cluster_key) == 64
    assert httpx.get(f"{compose.urls[0]}/debug/cluster", timeout=30).status_code == 401
    for service in ("conductor", "prefill", "decode", "kvstore-0"):
        for container in compose.containers(service):
            told = container.execute("stat", "-c", "%a %u", "/run/halfmoon/cluster-key")
            assert told.split() == ["600", "10001"]
            assert compose.cluster_key not in json.dumps(container.inspect())


def test_prometheus_may_ask_for_targets_and_reaches_the_workers(compose: Any) -> None:
    conductor = compose.containers("conductor")[0]
    token = conductor.execute("cat", "/run/halfmoon/operator-token").strip()
    told = conductor.execute("stat", "-c", "%a", "/run/halfmoon/operator-token")
    assert told.strip() == "644"
    shown = {"authorization": f"Bearer {token}"}
    url = f"{compose.urls[0]}/debug/prometheus-targets"
    groups = httpx.get(url, headers=shown, timeout=30).json()
    assert {group["labels"]["job"] for group in groups} == {
        "conductor", "prefill", "decode", "kvstore"
    }  # fmt: skip
    # Prometheus is in the conductor's network, and nowhere else.
    read = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).status)"
    for group in groups:
        page = f"http://{group['targets'][0]}/metrics"
        assert conductor.execute("python", "-c", read, page).strip() == "200"


def test_a_killed_worker_costs_no_token_and_is_replaced(
    compose: Any, expected: Callable[..., str]
) -> None:
    workers = {c.worker_id: (c, c.pid) for c in compose.containers("decode")}
    client = OpenAI(base_url=f"{compose.urls[0]}/v1", api_key="none", max_retries=0, timeout=300)
    body: Any = {"prompt": prompt(2), "max_tokens": N_LONG, "temperature": 0}
    text, worker = "", ""
    for n, chunk in enumerate(
        client.completions.create(
            model="demo", stream=True, extra_body={"ignore_eos": True}, **body
        )
    ):
        text += chunk.choices[0].text if chunk.choices else ""
        if n == 3:
            _, worker = compose.last_placement()
            os.kill(workers[worker][1], signal.SIGKILL)
    assert text == expected(prompt(2), N_LONG)
    assert compose.last_placement()[1] != worker, "the answer was over too soon to be disturbed"
    decode, _ = workers[worker]
    compose.until(lambda: decode.inspect()["RestartCount"] == 1)
    compose.until(lambda: worker in compose.live())


def test_redis_serves_no_stranger(compose: Any) -> None:
    (redis,) = compose.containers("redis")
    scan = 'redis-cli --no-auth-warning keys "*"'
    assert "NOAUTH" in redis.execute("sh", "-c", f"{scan} 2>&1")
    with_password = f'REDISCLI_AUTH="$(cat /run/halfmoon/redis-password)" {scan}'
    records = redis.execute("sh", "-c", with_password)
    assert all(worker in records for worker in compose.live())


def test_more_prefill_workers_join_when_asked_for(compose: Any) -> None:
    compose.up("--no-recreate", "--scale", "prefill=3")
    joined = {c.worker_id for c in compose.containers("prefill")}
    assert len(joined) == 3
    compose.until(lambda: joined <= compose.live())
    compose.up("--no-recreate", "--scale", "prefill=2", "--scale", "conductor=2")
    assert len(compose.urls) == 2


def test_every_service_restarts_under_load_without_a_failed_request(
    compose: Any, expected: Callable[..., str]
) -> None:
    compose.up("--no-recreate", "--scale", "conductor=2")
    urls, stop = compose.urls, threading.Event()
    wanted = {seed: expected(prompt(seed, 200)) for seed in range(20, 24)}
    answered = itertools.count()

    def ask_until_stopped(first: int) -> None:
        """As clients do: another conductor is asked when one is not there, or gives no answer."""
        for turn in itertools.count(first):
            if stop.is_set():
                return
            seed = 20 + turn % 4
            body = {"model": "demo", "prompt": prompt(seed, 200), "max_tokens": N_NEW}
            body |= {"temperature": 0, "ignore_eos": True}
            answer: httpx.Response | None = None
            for url in itertools.islice(itertools.cycle(urls), turn % 2, turn % 2 + 40):
                try:
                    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=240)
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
                    # Docker's proxy opens connections to who does not listen, and resets them.
                    time.sleep(0.25)
                    continue
                if answer.status_code != 503:
                    break
                time.sleep(0.25)
            assert answer is not None, "nobody listened"
            assert answer.status_code == 200, answer.text
            assert text_of(answer.json()) == wanted[seed]
            next(answered)

    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(ask_until_stopped, first) for first in range(3)]
        try:
            for role in ROLES:
                for container in compose.containers(role):
                    compose.docker("restart", "--time", "60", container.name)
                    compose.until(lambda container=container: container.is_healthy)
                    for client in clients:
                        assert client.running(), client.result(1)
        finally:
            stop.set()
        for client in clients:
            client.result(timeout=300)
    # What uvicorn says when a stop ends answers that are under way.
    assert "graceful shutdown exceeded" not in compose("logs", "--no-color", "conductor")
    print(f"{next(answered)} requests answered while every container was restarted")


def test_nothing_is_left_when_it_is_taken_down(compose: Any) -> None:
    compose("down", "--volumes", "--remove-orphans")
    label = f"label=com.docker.compose.project={compose.project}"
    assert compose.docker("ps", "-aq", "--filter", label) == ""
    assert compose.docker("volume", "ls", "-q", "--filter", label) == ""
    assert compose.docker("network", "ls", "-q", "--filter", label) == ""
