"""HEAD where GET is: the same headers and no body."""

import httpx
import pytest
from fastapi import FastAPI

from halfmoon_conductor.page.page_routes import page_routes

#: Two answers to these differ, as each tells of the requests before it.
COUNTING = ("/metrics",)


def paths(app: FastAPI) -> list[str]:
    """All paths that answer GET."""
    documented = [path for path, methods in app.openapi()["paths"].items() if "get" in methods]
    named = {"{model}": "lab/moon", "{response_id}": "resp_1"}
    for name, value in named.items():
        documented = [path.replace(name, value) for path in documented]
    return [*documented, "/openapi.json", *(route.path for route in page_routes())]


async def test_every_route_of_get_answers_head(client: httpx.AsyncClient, app: FastAPI) -> None:
    asked = paths(app)
    assert {"/health", "/ready", "/v1/models", "/v1/models/lab/moon", "/metrics", "/"} <= {*asked}
    for path in asked:
        got, head = await client.get(path), await client.head(path)
        assert (head.status_code, head.content) == (200, b""), path
        differing = {"x-request-id"} | ({"content-length"} if path in COUNTING else set())
        for name, value in got.headers.items():
            assert name in differing or head.headers[name] == value, path
        assert int(got.headers["content-length"]) == len(got.content) > 0


async def test_head_of_what_is_not_there_or_takes_no_get_is_told_as_for_get(
    client: httpx.AsyncClient,
) -> None:
    for path in ("/nowhere", "/v1/models/lab/sun", "/v1/completions"):
        got, head = await client.get(path), await client.head(path)
        assert (head.status_code, head.content) == (got.status_code, b"")
        assert head.headers.get("allow") == got.headers.get("allow")


@pytest.mark.parametrize("method", ["PUT", "OPTIONS"])
async def test_head_is_among_the_methods_that_are_told(
    client: httpx.AsyncClient, method: str
) -> None:
    for path in ("/health", "/ready", "/v1/models", "/v1/responses/resp_1", "/"):
        answer = await client.request(method, path)
        assert answer.status_code == 405
        assert {"GET", "HEAD"} <= {*answer.headers["allow"].split(", ")}, path
