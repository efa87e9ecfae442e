"""What a model's makers recommend holds where a request says nothing, in every API."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.inputs.sampling_defaults import NO_DEFAULTS, read_sampling_defaults
from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable
from halfmoon_testing.conductor_http import ScriptedGateway

OpenModel = Callable[[dict[str, Any]], AbstractAsyncContextManager[Any]]
STATED = {
    "temperature": 0.25,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
}
REQUESTS = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
]


@pytest.fixture
def open_model(tokenizer: HubTokenizer, card: ModelCard, write: Callable[[Any], Path]) -> OpenModel:
    """Open a client of a model with a generation config, and its gateway."""

    @asynccontextmanager
    async def opened(config: dict[str, Any]) -> AsyncIterator[Any]:
        gateway = ScriptedGateway([70, 71, 72, 0], model=card)
        defaults = read_sampling_defaults(str(write(config)), "auto")
        app = create_app(
            gateway, tokenizer, registry=CollectorRegistry(), sampling_defaults=defaults
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            yield client, gateway

    return opened


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    def write(config: Any) -> Path:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "generation_config.json").write_text(text)
        return tmp_path

    return write


def drawn(sampling: Any) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in STATED}


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_a_request_that_says_nothing_is_sampled_as_the_models_makers_say(
    open_model: OpenModel, path: str, body: dict[str, Any]
) -> None:
    async with open_model(STATED) as (client, gateway):
        for left_out in ({}, {"temperature": None}):
            answer = await client.post(path, json={"model": "lab/moon", **body, **left_out})
            assert answer.status_code == 200, answer.text
            assert drawn(gateway.requests.pop().sampling) == STATED
        answer = await client.post(path, json={"model": "lab/moon", **body, "temperature": 0})
        assert gateway.requests.pop().sampling.temperature == 0
        if path == "/v1/responses":
            assert (answer.json()["temperature"], answer.json()["top_p"]) == (0, 0.5)


async def test_a_request_overrides_each_default_even_with_a_value_that_asks_for_nothing(
    open_model: OpenModel,
) -> None:
    neutral = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    path, body = REQUESTS[0]
    async with open_model(STATED) as (client, gateway):
        for name, value in neutral.items():
            await client.post(path, json={"model": "lab/moon", **body, name: value})
            assert drawn(gateway.requests.pop().sampling) == {**STATED, name: value}


async def test_the_list_of_models_shows_what_holds(open_model: OpenModel) -> None:
    for config, shown in ((STATED, STATED), ({"eos_token_id": 0}, {})):
        async with open_model(config) as (client, _):
            (model,) = (await client.get("/v1/models")).json()["data"]
            assert model["default_sampling_params"] == shown
            one = (await client.get("/v1/models/lab/moon")).json()
            assert one == model


async def test_no_sampling_is_greedy_as_in_transformers(open_model: OpenModel) -> None:
    async with open_model({"do_sample": False, "temperature": 0.7}) as (client, gateway):
        path, body = REQUESTS[0]
        await client.post(path, json={"model": "lab/moon", **body})
        assert gateway.requests.pop().sampling.temperature == 0


async def test_the_models_limit_is_that_of_conversations_that_name_none(
    open_model: OpenModel,
) -> None:
    async with open_model({"max_new_tokens": 3}) as (client, gateway):
        for (path, body), limit in zip(REQUESTS, (16, 3, 3), strict=False):
            plain = {name: value for name, value in body.items() if "max_" not in name}
            await client.post(path, json={"model": "lab/moon", **plain})
            assert gateway.requests.pop().stopping.max_new_tokens == limit
        path, body = REQUESTS[1]
        await client.post(path, json={"model": "lab/moon", **body, "max_tokens": 9})
        assert gateway.requests.pop().stopping.max_new_tokens == 9


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -0.5),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", [1]),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", 10**30),
        ("top_k", 2.5),
        ("min_p", float("nan")),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("-inf")),
        ("max_new_tokens", 0),
        ("max_new_tokens", "9" * 100_000),
    ],
)
def test_a_default_that_no_request_may_have_is_refused_by_name(
    write: Callable[[Any], Path], name: str, value: Any
) -> None:
    folder = str(write({name: value}))
    with pytest.raises(TokenizerUnavailable) as caught:
        read_sampling_defaults(folder, "auto")
    said = str(caught.value)
    assert f"{name} is" in said
    assert "--generation-config none" in said
    assert len(said) < 600
    assert read_sampling_defaults(folder, "none") is NO_DEFAULTS


@pytest.mark.parametrize("content", ["[1]", "{", '{"temperature": ' + "[" * 10_000, "\x00"])
def test_a_damaged_file_is_refused_by_name(write: Callable[[Any], Path], content: str) -> None:
    with pytest.raises(TokenizerUnavailable, match="generation_config"):
        read_sampling_defaults(str(write(content)), "auto")


@pytest.mark.parametrize("source", ["fake://tiny", ""])
def test_a_model_without_the_file_has_no_defaults(tmp_path: Path, source: str) -> None:
    assert read_sampling_defaults(source or str(tmp_path), "auto").stated == {}
