"""A conductor that is told to stop finishes what it has begun."""

import json
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.e2e


def test_a_conductor_that_is_told_to_stop_finishes_its_streams_and_takes_no_more(
    start_cluster: Callable[..., Any],
) -> None:
    n_new = 80
    with start_cluster("fake://tiny?step_s=0.01", n_prefill=1, n_decode=1, n_kvstore=0) as live:
        conductor = next(name for name in live.cluster.processes if "conductor" in name)
        body = {"model": live.model, "prompt": [1, 2, 3], "max_tokens": n_new, "stream": True}
        n_events, last = 0, ""
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if not line:
                    continue
                last = line.removeprefix("data: ")
                n_events += last != "[DONE]" and bool(json.loads(last)["choices"][0]["text"])
                if n_events == 5:
                    live.process(conductor).signal(signal.SIGTERM)
        assert last == "[DONE]"
        assert n_events == n_new
        live.until(lambda: live.process(conductor).exit_code is not None)
        assert live.process(conductor).exit_code == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{live.url}/health", timeout=5)


@pytest.mark.parametrize("told", ["the conductor", "all processes"])
def test_streams_longer_than_a_lease_end_well_whoever_is_told_to_stop(
    start_cluster: Callable[..., Any], told: str
) -> None:
    """As Ctrl-C has it, or a service manager that tells all; their signal may come twice."""
    n_new = 130
    with (
        start_cluster("fake://tiny?step_s=0.1", n_prefill=1, n_decode=1, n_kvstore=1) as live,
        ThreadPoolExecutor(2) as clients,
    ):
        begun = [threading.Event() for _ in range(2)]

        def ask(number: int) -> tuple[int, str]:
            prompt = [number, 2, 3]
            body = {"model": live.model, "prompt": prompt, "max_tokens": n_new, "stream": True}
            n_tokens, last = 0, ""
            with httpx.stream(
                "POST", f"{live.url}/v1/completions", json=body, timeout=60
            ) as answer:
                for line in filter(None, answer.iter_lines()):
                    last = line.removeprefix("data: ")
                    n_tokens += last != "[DONE]" and bool(json.loads(last)["choices"][0]["text"])
                    if n_tokens == 2 and not begun[number].is_set():
                        begun[number].set()
            return n_tokens, last

        answers = [clients.submit(ask, number) for number in range(2)]
        assert all(each.wait(60) for each in begun)
        for _ in range(2):
            for name, process in live.cluster.processes.items():
                if told == "all processes" or "conductor" in name:
                    process.signal(signal.SIGTERM)
        assert [answer.result() for answer in answers] == [(n_new, "[DONE]")] * 2
        for name, process in live.cluster.processes.items():
            if told == "all processes" or "conductor" in name:
                assert process.wait(30) and process.exit_code == 0, name
