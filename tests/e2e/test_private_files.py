"""What services write is for their user alone, tells no prompt, and is JSON where asked for."""

import json
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

pytestmark = pytest.mark.e2e

SECRET = "xylophone-4711-quincunx"


def ask_in_every_way(cluster: Any) -> None:
    """Send the secret in requests that succeed, are refused, are left, and are no JSON."""
    chat = [{"role": "user", "content": SECRET}]
    url = f"{cluster.url}/v1"
    model = cluster.model
    assert cluster.complete(prompt=SECRET * 20, max_tokens=4)
    assert cluster.complete(prompt=list(SECRET.encode()), max_tokens=4)
    cluster.post("/v1/chat/completions", model=model, messages=chat, max_tokens=4, user=SECRET)
    cluster.post("/v1/chat/completions", model=model, messages=chat, stop=[SECRET], max_tokens=4)
    for wrong in ({"max_tokens": SECRET}, {"model": SECRET}, {"temperature": -1}, {SECRET: 1}):
        body = {"model": model, "messages": chat, **wrong}
        assert cluster.post("/v1/chat/completions", **body).status_code < 500
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": SECRET}}}
    cluster.post(
        "/v1/chat/completions", model=model, messages=chat, response_format=schema, max_tokens=4
    )
    for content in (f'{{"{SECRET}', f'{{"prompt": "{SECRET}", '):
        assert httpx.post(f"{url}/completions", content=content, timeout=60).status_code == 400
    body = {"model": model, "prompt": SECRET, "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as left:
        assert next(left.iter_lines())
    assert httpx.get(f"{url}/models/{SECRET}", timeout=60).status_code == 404


def test_files_of_services_are_their_users_alone_and_hold_no_prompt(
    start_cluster: Callable[..., Any], tmp_path: Path
) -> None:
    journal = tmp_path / "conductor.journal"
    disk = tmp_path / "disk"
    debug = ["--log-level", "debug"]
    extra = {
        "conductor": ["--journal-path", str(journal), *debug],
        "prefill": debug,
        "decode": debug,
        "kvstore": ["--disk-path", str(disk), "--disk-mib", "64", *debug],
    }
    with start_cluster("fake://quiet?step_s=0.001&max_context=8192", extra=extra) as cluster:
        ask_in_every_way(cluster)
        folder = cluster.cluster.folder
    tokens = list(SECRET.encode())[:8]
    spoken = [SECRET.encode(), str(tokens).strip("[]").encode()]
    packed = [msgspec.msgpack.encode(tokens)[1:], struct.pack("<8I", *tokens)]
    n_logs = 0
    for path in [*folder.rglob("*"), *tmp_path.rglob("*")]:
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path
        if path.is_file() and not path.is_relative_to(disk):
            n_logs += path.suffix == ".log"
            content = path.read_bytes()
            assert not [each for each in spoken + packed if each in content], path
    assert n_logs == 4


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
