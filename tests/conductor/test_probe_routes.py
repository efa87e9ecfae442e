"""What watches a conductor finds out without a key, and HEAD where GET is."""

import asyncio
from typing import Any

from fastapi import FastAPI

from halfmoon_conductor.page.page_routes import page_routes
from tests.conductor.fronts import COMPLETIONS, Front, error_of


async def test_a_conductor_that_lives_says_so_wherever_it_is_asked(front: Front) -> None:
    for path in ("/health", "/ping"):
        answer = await front.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        # A path has one method, so that `Allow` can tell all of them.
        assert (await front.client.options(path)).headers["allow"] == "GET, HEAD"


async def test_the_version_is_the_one_of_the_schema(front: Front, app: FastAPI) -> None:
    assert (await front.get("/version")).json() == {"version": app.version}
    assert (await front.get("/openapi.json")).json()["info"]["version"] == app.version


async def test_the_load_is_of_requests_that_are_being_answered(front: Front) -> None:
    front.gateway.n_before_pause = 1
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(front.ask(COMPLETIONS))
        while len(front.gateway.live) < 2:
            await asyncio.sleep(0.001)
        assert (await front.get("/load")).json() == {"server_load": 2}
        front.gateway.resume.set()
    assert (await front.get("/load")).json() == {"server_load": 0}


#: Routes of vLLM's server.
ELSEWHERE = [
    ("POST", "/v1/embeddings"), ("POST", "/v1/score"), ("POST", "/v1/rerank"),
    ("POST", "/v1/audio/transcriptions"), ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/responses/resp_1/cancel"), ("POST", "/v1/chat/completions/batch"),
    ("POST", "/inference/v1/generate"), ("POST", "/invocations"), ("POST", "/pooling"),
    ("POST", "/reset_prefix_cache"), ("GET", "/tokenizer_info"), ("GET", "/version/"),
]  # fmt: skip


async def test_routes_that_vllms_server_has_and_this_one_has_not_are_told_in_openais_shape(
    front: Front,
) -> None:
    for method, path in ELSEWHERE:
        body: Any = {} if method == "POST" else None
        error = error_of(await front.client.request(method, path, json=body), 404)
        assert f"{method} {path}" in error["message"] and "param" in error


def paths(app: FastAPI) -> list[str]:
    """All paths that answer GET."""
    documented = [path for path, methods in app.openapi()["paths"].items() if "get" in methods]
    for name, value in {"{model}": "lab/moon", "{response_id}": "resp_1"}.items():
        documented = [path.replace(name, value) for path in documented]
    return [*documented, "/openapi.json", *(route.path for route in page_routes())]


async def test_every_route_of_get_answers_head(front: Front, app: FastAPI) -> None:
    asked = paths(app)
    assert {"/health", "/ready", "/v1/models", "/v1/models/lab/moon", "/metrics", "/"} <= {*asked}
    for path in asked:
        got, head = await front.get(path), await front.client.head(path)
        assert (head.status_code, head.content) == (200, b""), path
        # Two answers of the metrics differ, as each tells of the requests before it.
        differing = {"x-request-id"} | ({"content-length"} if path == "/metrics" else set())
        for name, value in got.headers.items():
            assert name in differing or head.headers[name] == value, path
        assert int(got.headers["content-length"]) == len(got.content) > 0


async def test_head_of_what_is_not_there_or_takes_no_get_is_told_as_for_get(front: Front) -> None:
    for path in ("/nowhere", "/v1/models/lab/sun", COMPLETIONS):
        got, head = await front.get(path), await front.client.head(path)
        assert (head.status_code, head.content) == (got.status_code, b"")
        assert head.headers.get("allow") == got.headers.get("allow")


async def test_head_is_among_the_methods_that_are_told(front: Front) -> None:
    for path in ("/health", "/ready", "/v1/models", "/v1/responses/resp_1", "/"):
        for method in ("PUT", "OPTIONS"):
            answer = await front.client.request(method, path)
            assert answer.status_code == 405
            assert {"GET", "HEAD"} <= {*answer.headers["allow"].split(", ")}, path
