"""Who gets in, and what everybody else is told."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from halfmoon_conductor.errors import ApiError, ServerOverloaded, ServiceUnavailable
from halfmoon_conductor.routes.rest_app import RestLimits, create_app
from halfmoon_conductor.tenants import Tenant, Tenants, hash_api_key
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.conductor.fronts import (
    CHAT,
    COMPLETIONS,
    COUNT,
    DETOKENIZE,
    TOKENIZE,
    client_of,
    error_of,
)  # fmt: skip

PROMPT: dict[str, Any] = {"model": "lab/moon", "prompt": [70, 71, 72, 73], "max_tokens": 3}
LAB = {"authorization": "Bearer hm-lab"}
MOON = {"x-api-key": "hm-moon"}
TOKEN = {"authorization": "Bearer t0ken"}


class Door:
    """A client of a REST API with tenants or limits of the test's own."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.get, self.request, self.options = client.get, client.request, client.options

    async def ask(self, body: Any = PROMPT, **headers: str) -> httpx.Response:
        """Ask for a completion."""
        return await self.request("POST", COMPLETIONS, json=body, headers=headers)

    async def serves(self, **headers: str) -> httpx.Response:
        answer = await self.ask(**headers)
        assert answer.status_code == 200, answer.text
        return answer

    async def status(self, path: str, headers: dict[str, str], method: str = "GET") -> int:
        return (await self.request(method, path, headers=headers)).status_code


Open = Callable[..., Door]


@pytest.fixture
async def door(gateway: ScriptedGateway, tokenizer: HubTokenizer) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        def opened(
            *tenants: Tenant,
            tokens: Sequence[str] = (),
            behind_s: Callable[[], float] = lambda: 0.0,
            **limits: Any,
        ) -> Door:
            app = create_app(
                gateway,
                tokenizer,
                registry=CollectorRegistry(),
                limits=RestLimits(**limits),
                tenants=Tenants(tenants) if tenants else None,
                operator_tokens=tokens,
                behind_s=behind_s,
            )
            client = client_of(app)
            stack.push_async_callback(client.aclose)
            return Door(client)

        yield opened


def lab(**limits: Any) -> Tenant:
    return Tenant("lab", (hash_api_key("hm-lab"),), **limits)


def moon(**limits: Any) -> Tenant:
    return Tenant("moon", (hash_api_key("hm-moon"),), **limits)


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer"}, {"authorization": "Bearer hm-other"},
     {"authorization": "Basic hm-lab"}, {"x-api-key": "hm-LAB"}],
)  # fmt: skip
async def test_without_a_valid_key_nothing_is_served_or_said(
    door: Open, gateway: ScriptedGateway, headers: dict[str, str]
) -> None:
    client = door(lab())
    posts = (("POST", path) for path in (COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE))
    for method, path in (*posts, ("GET", "/v1/models"), ("GET", "/v1/nothing")):
        answer = await client.request(method, path, headers=headers, content=b"{no json")
        error = error_of(answer, 401)
        assert error["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-request-id"]
        assert "hm-" not in error["message"]
    assert not gateway.requests


async def test_either_header_lets_a_tenant_in_and_its_name_salts_its_cache(
    door: Open, gateway: ScriptedGateway
) -> None:
    client = door(lab(), moon())
    for headers in (LAB, MOON):
        answer = await client.ask({**PROMPT, "cache_salt": "s"}, **headers)
        assert answer.status_code == 200, answer.text
    assert [each.tenant for each in gateway.requests] == ["lab", "moon"]
    assert len({each.salt for each in gateway.requests}) == 2
    for path in ("/health", "/ready", "/metrics", "/openapi.json"):
        assert (await client.get(path)).status_code == 200
    answer = await client.get("/v1/models", headers={**LAB, **MOON})
    assert "key of lab, and x-api-key one of moon" in error_of(answer, 401)["message"]


@pytest.mark.parametrize("path", [COUNT, "/debug/none"])
async def test_one_valid_key_is_enough_whatever_the_other_header_has(door: Open, path: str) -> None:
    client = door(lab(), moon(operator=True))
    served = await client.status(path, MOON, "POST")
    assert served in (400, 404), "it was let in"
    for bearer in ("Bearer", "Bearer ", "Bearer hm-old", "Basic bGFi", "Bearer hm-moon"):
        assert await client.status(path, {"authorization": bearer, **MOON}, "POST") == served
    for other in ("", " ", "hm-old", "hm-moon"):
        headers = {"authorization": "Bearer hm-moon", "x-api-key": other}
        assert await client.status(path, headers, "POST") == served
    headers = {"authorization": "Bearer hm-old", "x-api-key": "hm-older"}
    assert await client.status(path, headers, "POST") == 401


async def test_a_tenant_that_asks_too_often_is_told_when_to_come_back_and_counted(
    door: Open, gateway: ScriptedGateway
) -> None:
    client = door(lab(requests_per_minute=2), moon())
    for _ in range(2):
        await client.serves(**LAB)
    answer = await client.ask(**LAB)
    assert error_of(answer, 429)["code"] == "rate_limit_exceeded"
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    await client.serves(**MOON)
    assert len(gateway.requests) == 3
    await client.ask()
    lines = (await client.get("/metrics")).text.splitlines()
    for reason, n in (("invalid_key", 1.0), ("tenant_limit", 1.0), ("concurrency", 0.0)):
        assert f'halfmoon_http_rejections_total{{reason="{reason}"}} {n}' in lines


@pytest.mark.parametrize("limit", ["tenant", "front"])
async def test_more_at_once_than_allowed_are_refused_until_one_ends(
    door: Open, gateway: ScriptedGateway, limit: str
) -> None:
    client = door(lab(max_concurrent=1)) if limit == "tenant" else door(max_concurrent=1)
    gateway.n_before_pause = 1
    first = asyncio.create_task(client.serves(**LAB))
    while not gateway.live:
        await asyncio.sleep(0)
    answer = await client.ask(**LAB)
    assert "at once" in error_of(answer, 429)["message"]
    assert answer.headers["retry-after"] == "1"
    assert (await client.get("/health")).status_code == 200
    gateway.resume.set()
    await first
    await client.serves(**LAB)


async def test_a_conductor_that_is_behind_takes_nothing_new_until_it_has_caught_up(
    door: Open,
) -> None:
    behind_s = 0.5
    client = door(behind_s=lambda: behind_s)
    await client.serves()
    behind_s = 2.5
    answer = await client.ask()
    assert "behind by 2.5 s" in error_of(answer, 429)["message"]
    assert answer.headers["retry-after"] == "5"
    assert (await client.get("/health")).status_code == 200
    behind_s = 0.0
    await client.serves()


async def test_browsers_are_let_in_only_from_the_origins_that_are_set(door: Open) -> None:
    ours, allowed = "https://lab.example", "access-control-allow-origin"
    asked = {"origin": ours, "access-control-request-method": "POST"}
    closed, opened = door(lab()), door(lab(), cors_origins=(ours,))
    assert allowed not in (await closed.options(COMPLETIONS, headers=asked)).headers
    preflight = await opened.options(COMPLETIONS, headers=asked)
    answer = await opened.ask(**LAB, origin=ours)
    assert preflight.headers[allowed] == answer.headers[allowed] == ours
    assert allowed not in (await opened.ask(**LAB, origin="https://other.example")).headers


async def test_what_is_for_operators_needs_an_operators_key_where_there_are_tenants(
    door: Open,
) -> None:
    assert await door().status("/debug/cluster", {}) == 404, "without tenants anybody is one"
    client = door(lab(), moon(operator=True, requests_per_minute=1))
    assert error_of(await client.get("/debug/cluster"), 401)["code"] == "invalid_api_key"
    refused = error_of(await client.get("/debug/cluster", headers=LAB), 403)
    assert refused["code"] == "not_permitted"
    assert "lab is none" in refused["message"]
    for _ in range(3):  # not counted: nothing is there, and it is the routes that say so
        assert await client.status("/debug/cluster", MOON) == 404
    await client.serves(**MOON)


async def test_with_a_cluster_key_the_routes_for_operators_want_its_token(door: Open) -> None:
    client = door(tokens=["t0ken"])
    for shown in ({}, LAB, {"authorization": "Basic t0ken"}, {"authorization": "Bearer t0ke"}):
        for method, path in (("GET", "/debug/cluster"), ("POST", "/debug/roles/decode-0")):
            refused = error_of(await client.request(method, path, headers=shown), 401)
            assert "halfmoon operator-token" in refused["message"]
    for shown in (TOKEN, {"x-api-key": "t0ken"}):
        assert await client.status("/debug/cluster", shown) == 404
    await client.serves()  # no key is needed here


async def test_with_tenants_and_a_cluster_key_either_opens_the_routes_for_operators(
    door: Open,
) -> None:
    client = door(lab(), moon(operator=True), tokens=["t0ken", "t0ken of another key"])
    for shown in (
        MOON,
        TOKEN,
        {"authorization": "Bearer t0ken of another key"},
        {**TOKEN, "x-api-key": "hm-lab"},
        {**LAB, "x-api-key": "t0ken"},
    ):
        assert await client.status("/debug/cluster", shown) == 404
    assert await client.status("/debug/cluster", LAB) == 403
    assert await client.status("/debug/cluster", {}) == 401
    error_of(await client.ask(**TOKEN), 401)


@pytest.mark.parametrize(
    "refusal", [ServerOverloaded("full", 1.0), ServiceUnavailable("no worker is there", 1.0)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_refused_for_lack_of_room_counts_against_no_rate(
    door: Open, gateway: ScriptedGateway, refusal: ApiError, stream: bool
) -> None:
    client = door(lab(requests_per_minute=2, tokens_per_minute=20))
    body = {**PROMPT, "prompt": list(range(10)), "max_tokens": 1, "stream": stream}
    gateway.refusal = refusal
    for _ in range(5):
        error = error_of(await client.ask(body, **LAB), refusal.status)
        assert error["code"] == refusal.code
    gateway.refusal = None
    assert (await client.ask(body, **LAB)).status_code == 200
    # This one is refused for its own rate of tokens, and is no request of the minute either.
    for _ in range(3):
        assert "tokens per minute" in error_of(await client.ask(body, **LAB), 429)["message"]
