"""With `--log-format json` all that services write to their logs is one JSON object a line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.e2e


@pytest.mark.usefixtures("started_programs")  # libraries learn of their bars when they are imported
def test_every_line_of_every_log_is_an_object_from_the_start_to_an_answer(
    start_cluster: Callable[..., Any], tiny_model: Path
) -> None:
    roles = ("conductor", "prefill", "decode", "kvstore")
    extra = {role: ["--log-format", "json"] for role in roles}
    # A real model: its libraries draw bars while they read weights.
    with start_cluster(str(tiny_model), n_prefill=1, n_decode=1, n_kvstore=1, extra=extra) as live:
        body = {"model": live.model, "prompt": [5, 6, 7], "max_tokens": 4}
        httpx.post(f"{live.url}/v1/completions", json=body, timeout=60).raise_for_status()
        logs = {name: each.last_lines(10_000) for name, each in live.cluster.processes.items()}
    assert len(logs) == 4
    for name, lines in logs.items():
        assert lines, f"{name} wrote nothing"
        for line in lines:
            entry = json.loads(line)
            assert {"event", "level", "timestamp"} <= entry.keys(), line
