"""Who gets in, and what everybody else is told."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from halfmoon_conductor.errors import (
    ApiError,
    RateLimited,
    ServerOverloaded,
    ServiceUnavailable,
)
from halfmoon_conductor.http_server.auth_middleware import Principal
from halfmoon_conductor.routes.rest_app import RestLimits, create_app
from halfmoon_conductor.tenants import Tenant, Tenants, hash_api_key
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway

COMPLETIONS = "/v1/completions"
PROMPT: dict[str, Any] = {"model": "lab/moon", "prompt": [70, 71, 72, 73], "max_tokens": 3}
LAB = {"authorization": "Bearer hm-lab"}
MOON = {"x-api-key": "hm-moon"}
Open = Callable[..., httpx.AsyncClient]


@pytest.fixture
async def open_front(gateway: ScriptedGateway, tokenizer: HubTokenizer) -> AsyncIterator[Open]:
    """Clients of a REST API with tenants or limits of the test's own."""
    clients: list[httpx.AsyncClient] = []

    def front(
        *tenants: Tenant,
        tokens: Sequence[str] = (),
        behind_s: Callable[[], float] = lambda: 0.0,
        **limits: Any,
    ) -> httpx.AsyncClient:
        app = create_app(
            gateway,
            tokenizer,
            registry=CollectorRegistry(),
            limits=RestLimits(**limits),
            tenants=Tenants(tenants) if tenants else None,
            operator_tokens=tokens,
            behind_s=behind_s,
        )
        clients.append(
            httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://front")
        )
        return clients[-1]

    yield front
    for client in clients:
        await client.aclose()


def lab(**limits: Any) -> Tenant:
    return Tenant("lab", (hash_api_key("hm-lab"),), **limits)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer"}, {"authorization": "Bearer hm-other"},
     {"authorization": "Basic hm-lab"}, {"x-api-key": "hm-LAB"}],
)  # fmt: skip
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", COMPLETIONS), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"),
     ("GET", "/v1/nothing"), ("POST", "/tokenize"), ("POST", "/detokenize")],
)  # fmt: skip
async def test_without_a_valid_key_nothing_is_served_or_said(
    open_front: Open, gateway: ScriptedGateway, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = await open_front(lab()).request(method, path, headers=headers, content=b"{no json")
    error = error_of(answer, 401)
    assert error["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-request-id"]
    assert "hm-" not in error["message"]
    assert not gateway.requests


async def test_either_header_lets_a_tenant_in_and_its_name_salts_its_cache(
    open_front: Open, gateway: ScriptedGateway
) -> None:
    client = open_front(lab(), Tenant("moon", (hash_api_key("hm-moon"),)))
    for headers in (LAB, MOON):
        answer = await client.post(COMPLETIONS, json={**PROMPT, "cache_salt": "s"}, headers=headers)
        assert answer.status_code == 200, answer.text
    assert [each.tenant for each in gateway.requests] == ["lab", "moon"]
    assert len({each.salt for each in gateway.requests}) == 2
    for path in ("/health", "/ready", "/metrics", "/openapi.json"):
        assert (await client.get(path)).status_code == 200


BEARERS = ("Bearer", "Bearer ", "Bearer hm-old", "Basic bGFi", "Bearer hm-moon")


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/debug/none"])
async def test_one_valid_key_is_enough_whatever_the_other_header_has(
    open_front: Open, path: str
) -> None:
    moon = Tenant("moon", (hash_api_key("hm-moon"),), operator=True)
    client = open_front(lab(), moon)
    body = {"model": "lab/moon", "messages": [{"role": "user", "content": "a"}]}

    async def status(headers: dict[str, str]) -> int:
        return (await client.post(path, json=body, headers=headers)).status_code

    served = await status(MOON)
    assert served in (200, 404)
    for bearer in BEARERS:
        assert await status({"authorization": bearer, **MOON}) == served
    for other in ("", " ", "hm-old", "hm-moon"):
        assert await status({"authorization": "Bearer hm-moon", "x-api-key": other}) == served
    assert await status({"authorization": "Bearer hm-old", "x-api-key": "hm-older"}) == 401


async def test_keys_of_two_tenants_are_refused_by_their_names(open_front: Open) -> None:
    client = open_front(lab(), Tenant("moon", (hash_api_key("hm-moon"),)))
    answer = await client.get("/v1/models", headers={**LAB, **MOON})
    assert "key of lab, and x-api-key one of moon" in error_of(answer, 401)["message"]


async def test_an_operators_token_opens_their_routes_beside_another_key(open_front: Open) -> None:
    client = open_front(lab(), tokens=("t0ken",))
    for headers in (
        {"authorization": "Bearer t0ken", "x-api-key": "hm-lab"},
        {"authorization": "Bearer hm-lab", "x-api-key": "t0ken"},
    ):
        assert (await client.get("/debug/none", headers=headers)).status_code == 404


async def test_a_tenant_that_asks_too_often_is_told_when_to_come_back(
    open_front: Open, gateway: ScriptedGateway
) -> None:
    client = open_front(lab(requests_per_minute=2), Tenant("moon", (hash_api_key("hm-moon"),)))
    for _ in range(2):
        assert (await client.post(COMPLETIONS, json=PROMPT, headers=LAB)).status_code == 200
    answer = await client.post(COMPLETIONS, json=PROMPT, headers=LAB)
    assert error_of(answer, 429)["code"] == "rate_limit_exceeded"
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert (await client.post(COMPLETIONS, json=PROMPT, headers=MOON)).status_code == 200
    assert len(gateway.requests) == 3


async def test_prompts_and_answers_use_up_a_tenants_tokens(
    open_front: Open, gateway: ScriptedGateway
) -> None:
    client = open_front(lab(tokens_per_minute=14))
    for _ in range(2):  # 4 + 3 tokens each
        assert (await client.post(COMPLETIONS, json=PROMPT, headers=LAB)).status_code == 200
    answer = await client.post(COMPLETIONS, json=PROMPT, headers=LAB)
    assert "tokens per minute" in error_of(answer, 429)["message"]
    assert len(gateway.requests) == 2


@pytest.mark.parametrize("limit", ["tenant", "front"])
async def test_more_at_once_than_allowed_are_refused_until_one_ends(
    open_front: Open, gateway: ScriptedGateway, limit: str
) -> None:
    client = (
        open_front(lab(max_concurrent=1)) if limit == "tenant" else open_front(max_concurrent=1)
    )
    gateway.n_before_pause = 1
    first = asyncio.create_task(client.post(COMPLETIONS, json=PROMPT, headers=LAB))
    while not gateway.live:
        await asyncio.sleep(0)
    answer = await client.post(COMPLETIONS, json=PROMPT, headers=LAB)
    assert "at once" in error_of(answer, 429)["message"]
    assert answer.headers["retry-after"] == "1"
    assert (await client.get("/health")).status_code == 200
    gateway.resume.set()
    assert (await first).status_code == 200
    assert (await client.post(COMPLETIONS, json=PROMPT, headers=LAB)).status_code == 200


async def test_a_conductor_that_is_behind_takes_nothing_new_until_it_has_caught_up(
    open_front: Open, gateway: ScriptedGateway
) -> None:
    behind_s = 0.5
    client = open_front(behind_s=lambda: behind_s)
    assert (await client.post(COMPLETIONS, json=PROMPT)).status_code == 200
    behind_s = 2.5
    answer = await client.post(COMPLETIONS, json=PROMPT)
    assert "behind by 2.5 s" in error_of(answer, 429)["message"]
    assert answer.headers["retry-after"] == "5"
    assert (await client.get("/health")).status_code == 200
    behind_s = 0.0
    assert (await client.post(COMPLETIONS, json=PROMPT)).status_code == 200


async def test_browsers_are_let_in_only_from_the_origins_that_are_set(open_front: Open) -> None:
    asked = {"origin": "https://lab.example", "access-control-request-method": "POST"}
    closed, opened = open_front(lab()), open_front(lab(), cors_origins=("https://lab.example",))
    refused = await closed.options(COMPLETIONS, headers=asked)
    assert "access-control-allow-origin" not in refused.headers
    preflight = await opened.options(COMPLETIONS, headers=asked)
    assert preflight.headers["access-control-allow-origin"] == "https://lab.example"
    answer = await opened.post(
        COMPLETIONS, json=PROMPT, headers={**LAB, "origin": "https://lab.example"}
    )
    assert answer.headers["access-control-allow-origin"] == "https://lab.example"
    other = await opened.post(
        COMPLETIONS, json=PROMPT, headers={**LAB, "origin": "https://other.example"}
    )
    assert "access-control-allow-origin" not in other.headers


def test_a_limit_is_over_when_its_time_has_passed() -> None:
    now_s = 0.0
    principal = Principal(lab(requests_per_minute=1, max_concurrent=5), lambda: now_s)
    principal.acquire()
    with pytest.raises(RateLimited) as refused:
        principal.acquire()
    assert refused.value.retry_after_s == pytest.approx(60.0)
    now_s = 60.0
    principal.release()
    principal.acquire()
    assert principal.n_running == 1


async def test_what_is_for_operators_needs_an_operators_key_where_there_are_tenants(
    open_front: Open,
) -> None:
    moon = Tenant("moon", (hash_api_key("hm-moon"),), operator=True, requests_per_minute=1)
    client = open_front(lab(), moon)
    assert error_of(await client.get("/debug/cluster"), 401)["code"] == "invalid_api_key"
    refused = error_of(await client.get("/debug/cluster", headers=LAB), 403)
    assert refused["code"] == "not_permitted"
    assert "lab is none" in refused["message"]
    for _ in range(3):  # not counted: nothing is there, and it is the routes that say so
        assert (await client.get("/debug/cluster", headers=MOON)).status_code == 404
    assert (await client.post(COMPLETIONS, json=PROMPT, headers=MOON)).status_code == 200


async def test_without_tenants_anybody_is_an_operator(open_front: Open) -> None:
    assert (await open_front().get("/debug/cluster")).status_code == 404


async def test_with_a_cluster_key_the_routes_for_operators_want_its_token(
    open_front: Open,
) -> None:
    client = open_front(tokens=["t0ken"])
    for shown in ({}, LAB, {"authorization": "Basic t0ken"}, {"authorization": "Bearer t0ke"}):
        for method, path in (("GET", "/debug/cluster"), ("POST", "/debug/roles/decode-0")):
            refused = error_of(await client.request(method, path, headers=shown), 401)
            assert "halfmoon operator-token" in refused["message"]
    for shown in ({"authorization": "Bearer t0ken"}, {"x-api-key": "t0ken"}):
        assert (await client.get("/debug/cluster", headers=shown)).status_code == 404
    assert (await client.post(COMPLETIONS, json=PROMPT)).status_code == 200, "no key is needed here"


async def test_with_tenants_and_a_cluster_key_either_opens_the_routes_for_operators(
    open_front: Open,
) -> None:
    moon = Tenant("moon", (hash_api_key("hm-moon"),), operator=True)
    client = open_front(lab(), moon, tokens=["t0ken", "t0ken of another key"])
    token = {"authorization": "Bearer t0ken"}
    for shown in (MOON, token, {"authorization": "Bearer t0ken of another key"}):
        assert (await client.get("/debug/cluster", headers=shown)).status_code == 404
    error_of(await client.get("/debug/cluster", headers=LAB), 403)
    error_of(await client.get("/debug/cluster"), 401)
    error_of(await client.post(COMPLETIONS, json=PROMPT, headers=token), 401)


async def test_who_was_turned_away_is_counted_by_reason(open_front: Open) -> None:
    front = open_front(lab(requests_per_minute=1))
    for headers in ({}, LAB, LAB, LAB):
        await front.post(COMPLETIONS, json=PROMPT, headers=headers)
    lines = (await front.get("/metrics")).text.splitlines()
    assert 'halfmoon_http_rejections_total{reason="invalid_key"} 1.0' in lines
    assert 'halfmoon_http_rejections_total{reason="tenant_limit"} 2.0' in lines
    assert 'halfmoon_http_rejections_total{reason="concurrency"} 0.0' in lines


@pytest.mark.parametrize(
    "refusal", [ServerOverloaded("full", 1.0), ServiceUnavailable("no worker is there", 1.0)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_refused_for_lack_of_room_counts_against_no_rate(
    open_front: Open, gateway: ScriptedGateway, refusal: ApiError, stream: bool
) -> None:
    client = open_front(lab(requests_per_minute=2, tokens_per_minute=20))
    body = {**PROMPT, "prompt": list(range(10)), "max_tokens": 1, "stream": stream}
    gateway.refusal = refusal
    for _ in range(5):
        answer = await client.post(COMPLETIONS, json=body, headers=LAB)
        assert error_of(answer, refusal.status)["code"] == refusal.code
    gateway.refusal = None
    assert (await client.post(COMPLETIONS, json=body, headers=LAB)).status_code == 200
    # This one is refused for its own rate of tokens, and is no request of the minute either.
    for _ in range(3):
        answer = await client.post(COMPLETIONS, json=body, headers=LAB)
        assert "tokens per minute" in error_of(answer, 429)["message"]
