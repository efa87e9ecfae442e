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


def test_a_client_streams_a_chat(compose: Any) -> None:
    client = OpenAI(base_url=f"{compose.urls[0]}/v1", api_key="none")
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Ada's code is 4821. What is Ada's code?"}],
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "4821"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_a_prefix_is_reused_by_another_prefill_container(
    compose: Any, expected: Callable[..., str]
) -> None:
    first = compose.complete(prompt(1), N_NEW)
    assert text_of(first) == expected(prompt(1))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    worker, _ = compose.last_placement()
    computed_it = compose.container_of(worker)
    compose.docker("stop", computed_it.name)
    try:
        compose.until(lambda: worker not in compose.live())
        again = compose.complete(prompt(1), N_NEW)
        assert compose.last_placement()[0] != worker
        assert text_of(again) == text_of(first)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 640
    finally:
        compose.docker("start", computed_it.name)
    compose.until(lambda: worker in compose.live())


class Answer:
    """A streamed completion, read in a thread of its own."""

    def __init__(self, url: str, tokens: list[int], n_new: int) -> None:
        self._n_new = n_new
        self._pieces: list[str] = []
        self._begun = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._text = self._pool.submit(self._read, url, tokens)

    def _read(self, url: str, tokens: list[int]) -> str:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        chunks = client.completions.create(
            model="demo",
            prompt=tokens,
            max_tokens=self._n_new,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        try:
            for chunk in chunks:
                self._pieces.append(chunk.choices[0].text if chunk.choices else "")
                if len(self._pieces) == 3:
                    self._begun.set()
        finally:
            self._begun.set()
        return "".join(self._pieces)

    def wait_until_begun(self) -> None:
        assert self._begun.wait(300), "no token came"
        self.require_under_way()

    def require_under_way(self) -> None:
        """What has just been done to the cluster was done while it answered."""
        if self._text.done():
            self._text.result()
            pytest.fail(f"the answer was over too soon to be disturbed: ask for over {self._n_new}")

    def text(self) -> str:
        """All of it, when it is there."""
        return self._text.result(timeout=400)


@pytest.fixture
def ask(compose: Any) -> Callable[[list[int], int], Answer]:
    """Ask for an answer, and return when its first tokens have come."""

    def begun(tokens: list[int], n_new: int) -> Answer:
        answer = Answer(compose.urls[0], tokens, n_new)
        answer.wait_until_begun()
        return answer

    return begun


def test_a_killed_worker_costs_no_token_and_is_replaced(
    compose: Any, expected: Callable[..., str], ask: Callable[..., Answer]
) -> None:
    workers = {c.worker_id: (c, c.pid) for c in compose.containers("decode")}
    answer = ask(prompt(2), N_LONG)
    _, worker = compose.last_placement()
    decode, pid = workers[worker]
    os.kill(pid, signal.SIGKILL)
    answer.require_under_way()
    assert answer.text() == expected(prompt(2), N_LONG)
    compose.until(lambda: decode.inspect()["RestartCount"] == 1)
    compose.until(lambda: worker in compose.live())


def test_a_decode_worker_cut_off_the_network_costs_no_token(
    compose: Any, expected: Callable[..., str], ask: Callable[..., Answer]
) -> None:
    workers = {c.worker_id: (c, c.pid) for c in compose.containers("decode")}
    answer = ask(prompt(3), N_LONG)
    _, worker = compose.last_placement()
    decode, pid = workers[worker]
    networks = [f"{compose.project}_{name}" for name in ("control", "payload")]
    # It stands still until it is alone, however quick it is.
    os.kill(pid, signal.SIGSTOP)
    try:
        answer.require_under_way()
        found = decode.inspect()["NetworkSettings"]["Networks"]
        addresses = {network: found[network]["IPAddress"] for network in networks}
        for network in networks:
            compose.docker("network", "disconnect", network, decode.name)
    finally:
        os.kill(pid, signal.SIGCONT)
    try:
        assert answer.text() == expected(prompt(3), N_LONG)
        compose.until(lambda: worker not in compose.live())
    finally:
        for network in networks:
            # Back at the address that it told its peers.
            compose.docker(
                *("network", "connect", "--ip", addresses[network], network, decode.name)
            )
    compose.until(lambda: worker in compose.live())


def looks_at_members(prefill: Any) -> float:
    """How often this worker has made sure that it knows all others."""
    return float(prefill.metric("halfmoon_prefill_member_refreshes_total", result="done"))


def test_redis_serves_no_stranger(compose: Any) -> None:
    (redis,) = compose.containers("redis")
    scan = 'redis-cli --no-auth-warning keys "*"'
    assert "NOAUTH" in redis.execute("sh", "-c", f"{scan} 2>&1")
    with_password = f'REDISCLI_AUTH="$(cat /run/halfmoon/redis-password)" {scan}'
    records = redis.execute("sh", "-c", with_password)
    assert all(worker in records for worker in compose.live())


def test_requests_are_served_while_redis_is_cut_off(
    compose: Any, expected: Callable[..., str]
) -> None:
    redis, prefills = compose.containers("redis")[0], compose.containers("prefill")
    before, network = compose.live(), f"{compose.project}_control"
    # Whoever has joined or came back may not have met everybody yet.
    n_before = {container: looks_at_members(container) for container in prefills}
    # One look may be under way.
    compose.until(lambda: all(looks_at_members(each) >= n + 2 for each, n in n_before.items()))
    compose.docker("network", "disconnect", network, redis.name)
    try:
        # Longer than the leases of the workers' records.
        until = time.monotonic() + 15
        while time.monotonic() < until:
            assert text_of(compose.complete(prompt(4), N_NEW)) == expected(prompt(4))
        assert compose.live() == before
    finally:
        compose.docker("network", "connect", "--alias", "redis", network, redis.name)
    compose.docker("restart", prefills[0].name)
    compose.until(lambda: compose.live() == before)
    assert text_of(compose.complete(prompt(5), N_NEW)) == expected(prompt(5))


def test_a_kvstore_that_hangs_costs_its_cache_and_nothing_else(
    compose: Any, expected: Callable[..., str]
) -> None:
    assert text_of(compose.complete(prompt(6), N_NEW)) == expected(prompt(6))
    kvstores = [compose.containers(name)[0] for name in ("kvstore-0", "kvstore-1")]
    for kvstore in kvstores:
        compose.docker("pause", kvstore.name)
    try:
        assert text_of(compose.complete(prompt(6), N_NEW)) == expected(prompt(6))
    finally:
        for kvstore in kvstores:
            compose.docker("unpause", kvstore.name)
    compose.until(lambda: {"kvstore-0", "kvstore-1"} <= compose.live())
    compose.until(lambda: all(kvstore.is_healthy for kvstore in kvstores))


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
