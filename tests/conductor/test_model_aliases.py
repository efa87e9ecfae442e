"""A client that insists on a model's name of its own is served under that name."""

from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.settings import ConductorSettings
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def aliased(
    gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> AsyncIterator[httpx.AsyncClient]:
    """Of a front whose model has two other names."""
    app = create_app(
        gateway, tokenizer, registry=CollectorRegistry(), model_aliases=("gpt-4o", "claude-*")
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        yield client


@pytest.mark.parametrize("name", ["gpt-4o", "claude-", "claude-sonnet-4-5", "lab/moon"])
async def test_an_alias_is_answered_under_the_name_that_was_asked_for(
    aliased: httpx.AsyncClient, name: str
) -> None:
    body = {"model": name, "messages": HELLO, "max_tokens": 3}
    for path in ("/v1/chat/completions", "/v1/messages"):
        answer = await aliased.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
    answer = await aliased.post("/v1/responses", json={"model": name, "input": "Hello"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    assert (await aliased.get(f"/v1/models/{name}")).json()["id"] == "lab/moon"


@pytest.mark.parametrize("name", ["gpt-4o-mini", "gpt", "my-claude-1", "claude", "claude*"])
async def test_other_names_are_not_found(aliased: httpx.AsyncClient, name: str) -> None:
    body = {"model": name, "messages": HELLO}
    assert (await aliased.post("/v1/chat/completions", json=body)).status_code == 404


def test_aliases_are_separated_by_commas_and_a_star_is_at_the_end() -> None:
    settings = ConductorSettings(model="fake://tiny", model_aliases=" gpt-4o, claude-* ,")
    assert settings.other_model_names == ("gpt-4o", "claude-*")
    with pytest.raises(ValidationError, match="'a\\*b' has a \\* before its end"):
        ConductorSettings(model="fake://tiny", model_aliases="a*b")
