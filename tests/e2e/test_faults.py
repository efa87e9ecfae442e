"""Processes that die in the middle, and what the client sees of it: nothing, or an error."""

import base64
import json
import re
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from halfmoon_engine.fake_engine import FakeEngine, parse_fake_spec

pytestmark = pytest.mark.e2e

SLOW = "fake://slow?step_s=0.004&max_context=8192"
#: Its streams last for seconds after the few tokens that a test waits for: a busy machine sends on
#: what it has, and a worker that dies after its last token proves nothing.
SLOWER = "fake://slow?step_s=0.02&max_context=8192"
StartCluster = Callable[..., Any]


def stream(cluster: Any, prompt: list[int], n_new: int) -> Iterator[dict[str, Any]]:
    """The SSE events of one completion, `[DONE]` as ``{"done": True}``."""
    body = {
        "model": cluster.model,
        "prompt": prompt,
        "max_tokens": n_new,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield {"done": True} if data == "[DONE]" else json.loads(data)


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(e["choices"][0]["text"] for e in events if e.get("choices"))


def expected_text(prompt: list[int], n_new: int) -> str:
    tokens = FakeEngine(parse_fake_spec(SLOW), block_size=64).expected(prompt, n_new)
    return "".join(f" t{token}" for token in tokens)


def chosen(cluster: Any, role: str) -> str:
    placement = cluster.decisions()[-1]["placement"]
    return str(placement["decode"] if role == "decode" else placement["chosen"]["worker_id"])


def test_a_decode_killed_in_mid_stream_costs_no_token(start_cluster: StartCluster) -> None:
    prompt = list(range(300))
    with start_cluster(SLOWER, n_decode=2) as cluster:
        events: list[dict[str, Any]] = []
        for event in stream(cluster, prompt, 200):
            events.append(event)
            if len(events) == 10:
                cluster.process(chosen(cluster, "decode")).signal(signal.SIGKILL)
        assert text_of(events) == expected_text(prompt, 200)
        usage = next(e["usage"] for e in events if e.get("usage"))
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (300, 200)
        assert events[-1] == {"done": True}
        cluster.until(lambda: len(cluster.live()) == 3)


def test_a_prefill_killed_in_mid_prompt_costs_no_token(start_cluster: StartCluster) -> None:
    prompt = [i % 900 for i in range(6000)]
    extra = {"prefill": ["--chunk-tokens", "32", "--max-chunk-tokens", "32"]}
    with (
        start_cluster(SLOW, n_prefill=2, extra=extra) as cluster,
        ThreadPoolExecutor(1) as client,
    ):
        answer = client.submit(lambda: list(stream(cluster, prompt, 200)))
        cluster.until(lambda: bool(cluster.decisions()))
        cluster.process(chosen(cluster, "prefill")).signal(signal.SIGKILL)
        events = answer.result(timeout=60)
        assert text_of(events) == expected_text(prompt, 200)
        assert len(cluster.decisions()) == 2  # it was placed again
        assert events[-1] == {"done": True}


def test_the_last_decode_killed_ends_the_stream_in_an_error_event(
    start_cluster: StartCluster,
) -> None:
    with start_cluster(SLOWER) as cluster:
        events: list[dict[str, Any]] = []
        for event in stream(cluster, [1, 2, 3], 500):
            events.append(event)
            if len(events) == 10:
                cluster.process("decode-0").signal(signal.SIGKILL)
        errors = [event for event in events if "error" in event]
        assert len(errors) == 1
        assert errors[0]["error"]["message"]
        refused = cluster.post("/v1/completions", model="slow", prompt=[1], max_tokens=2)
        assert refused.status_code == 503
        assert float(refused.headers["retry-after"]) > 0
        assert "decode" in refused.json()["error"]["message"]
        cluster.cluster.restart("decode-0")
        cluster.until(lambda: "decode-0" in cluster.live())
        assert cluster.complete(prompt=[1], max_tokens=2)["usage"]["completion_tokens"] == 2


def test_garbage_on_every_socket_leaves_the_services_alive(start_cluster: StartCluster) -> None:
    with start_cluster("fake://tiny") as cluster:
        ports = [int(cluster.url.rsplit(":", 1)[1])]
        for record in (
            httpx.get(cluster.metadata_url, params={"prefix": "halfmoon/"}, timeout=5)
            .json()
            .values()
        ):
            ports += _ports_in(record)
        assert len(ports) >= 7
        for port in ports:
            for garbage in (b"\x00" * 64, b"\xff" * 4096, b"GET / HTTP/9.9\r\n\r\n", b"\x7f"):
                with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                    connection.sendall(garbage)
        assert not cluster.cluster.dead()
        assert cluster.complete(prompt=[1, 2], max_tokens=5)["usage"]["completion_tokens"] == 5


def _ports_in(record: str) -> list[int]:
    text = base64.b64decode(record).decode(errors="replace")
    return [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", text)]


def test_a_hanging_decode_is_noticed_and_its_request_placed_again(
    start_cluster: StartCluster,
) -> None:
    with start_cluster(SLOW, n_decode=2) as cluster:
        events: list[dict[str, Any]] = []
        frozen = None
        for event in stream(cluster, [5, 6, 7], 150):
            events.append(event)
            if len(events) == 30:
                frozen = cluster.process(chosen(cluster, "decode"))
                frozen.signal(signal.SIGSTOP)
        assert frozen is not None
        frozen.signal(signal.SIGKILL)
        assert text_of(events) == expected_text([5, 6, 7], 150)
