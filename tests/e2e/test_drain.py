"""A conductor that is told to stop finishes what it has begun."""

import json
import signal
from collections.abc import Callable
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
