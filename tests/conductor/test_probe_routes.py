"""What watches a conductor finds out without a key."""

import asyncio

import httpx
from fastapi import FastAPI

from halfmoon_testing.conductor_http import ScriptedGateway

PROMPT = {"model": "lab/moon", "prompt": "Say it", "max_tokens": 3}


async def test_a_conductor_that_lives_says_so_wherever_it_is_asked(
    client: httpx.AsyncClient,
) -> None:
    for path in ("/health", "/ping"):
        answer = await client.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        # A path has one method, so that `Allow` can tell all of them.
        assert (await client.options(path)).headers["allow"] == "GET, HEAD"


async def test_the_version_is_the_one_of_the_schema(
    client: httpx.AsyncClient, app: FastAPI
) -> None:
    assert (await client.get("/version")).json() == {"version": app.version}
    assert (await client.get("/openapi.json")).json()["info"]["version"] == app.version


async def test_the_load_is_of_requests_that_are_being_answered(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.n_before_pause = 1
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(client.post("/v1/completions", json=PROMPT))
        while len(gateway.live) < 2:
            await asyncio.sleep(0.001)
        assert (await client.get("/load")).json() == {"server_load": 2}
        gateway.resume.set()
    assert (await client.get("/load")).json() == {"server_load": 0}


#: Routes of vLLM's server.
ELSEWHERE = [
    ("POST", "/v1/embeddings"), ("POST", "/v1/score"), ("POST", "/v1/rerank"),
    ("POST", "/v1/audio/transcriptions"), ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/responses/resp_1/cancel"), ("POST", "/v1/chat/completions/batch"),
    ("POST", "/inference/v1/generate"), ("POST", "/invocations"), ("POST", "/pooling"),
    ("POST", "/reset_prefix_cache"), ("GET", "/tokenizer_info"), ("GET", "/version/"),
]  # fmt: skip


async def test_routes_that_vllms_server_has_and_this_one_has_not_are_told_in_openais_shape(
    client: httpx.AsyncClient,
) -> None:
    for method, path in ELSEWHERE:
        answer = await client.request(method, path, json={} if method == "POST" else None)
        assert answer.status_code == 404, path
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert f"{method} {path}" in error["message"]
