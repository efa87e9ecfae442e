"""Fields that change no answer are taken with any well-formed value, and are bounded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway

HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "lab/moon", "prompt": "Hi"},
    "/v1/chat/completions": {"model": "lab/moon", "messages": HELLO},
    "/v1/responses": {"model": "lab/moon", "input": "Hi"},
}
LABELS = ["user", "safety_identifier", "prompt_cache_key", "session_id", "chat_id"]
WORDS = ["prompt_cache_retention", "service_tier"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {f"{i:064}": "x" * 512 for i in range(16)}},
        {"metadata": {}},
        {"store": True},
        {"store": False},
        *({"service_tier": tier} for tier in ("auto", "default", "flex", "scale", "priority")),
        *({"prompt_cache_retention": kept} for kept in ("in_memory", "in-memory", "24h")),
        {"prompt_cache_options": {"mode": "implicit", "ttl": "1h"}},
        *({name: "x" * 1024} for name in LABELS),
        *({name: "半" * 64} for name in WORDS),
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_any_well_formed_value_is_taken(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    answer = await client.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {str(i): "x" for i in range(17)}},
        {"metadata": {"x" * 65: "x"}},
        {"metadata": {"a": "x" * 513}},
        {"metadata": {"a": 1}},
        {"metadata": {"a": None}},
        {"metadata": ["a"]},
        {"store": "yes"},
        {"store": 1},
        {"service_tier": 1},
        {"prompt_cache_options": {"mode": {"deep": []}}},
        *({name: "x" * 1025} for name in LABELS),
        *({name: "x" * 65} for name in WORDS),
        *({name: ["x"]} for name in LABELS + WORDS),
        *({name: "\ud800"} for name in LABELS + WORDS),
        {"metadata": {"\ud800": "x"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_is_malformed_or_too_long_is_refused_by_name(
    client: httpx.AsyncClient, gateway: ScriptedGateway, path: str, fields: dict[str, Any]
) -> None:
    # By hand: httpx would not write half of a surrogate pair.
    answer = await client.post(
        path,
        content=json.dumps({**BODIES[path], **fields}),
        headers={"content-type": "application/json"},
    )
    (name,) = fields
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].split(".")[0] == name
    assert not gateway.requests


@pytest.mark.parametrize(
    ("path", "fields", "taken"),
    [
        ("/v1/chat/completions", {"prediction": {"type": "content", "content": "Yes"}}, True),
        (
            "/v1/chat/completions",
            {"prediction": {"type": "content", "content": [{"type": "text", "text": "Yes"}]}},
            True,
        ),
        ("/v1/chat/completions", {"prediction": {"type": "other", "content": "Yes"}}, False),
        ("/v1/chat/completions", {"prediction": {}}, False),
        ("/v1/chat/completions", {"reasoning_effort": "xhigh", "verbosity": "high"}, True),
        ("/v1/chat/completions", {"reasoning_effort": 3}, False),
        (
            "/v1/chat/completions",
            {"stream": True, "stream_options": {"include_obfuscation": False}},
            True,
        ),
        (
            "/v1/completions",
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            True,
        ),
        ("/v1/responses", {"stream_options": {"include_obfuscation": False}}, True),
        ("/v1/responses", {"stream_options": {"include_obfuscation": 3}}, False),
        ("/v1/responses", {"reasoning": {"effort": "high", "summary": "auto"}}, True),
        ("/v1/responses", {"reasoning": {"effort": ["high"]}}, False),
        ("/v1/responses", {"text": {"verbosity": "low"}}, True),
        ("/v1/responses", {"include": ["reasoning.encrypted_content"]}, True),
        ("/v1/responses", {"include": ["message.output_text.logprobs"]}, False),
    ],
)
async def test_what_one_route_has_is_checked_there(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], taken: bool
) -> None:
    answer = await client.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == (200 if taken else 400), answer.text


async def test_a_response_repeats_its_labels_and_says_what_was_done(
    client: httpx.AsyncClient,
) -> None:
    labels = {
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "user": "u",
        "reasoning": {"effort": "low", "summary": None},
    }
    asked = {**BODIES["/v1/responses"], **labels, "service_tier": "flex", "store": True}
    answer = (await client.post("/v1/responses", json=asked)).json()
    assert {name: answer[name] for name in labels} == labels
    assert (answer["service_tier"], answer["store"], answer["background"]) == (
        "default", True, False,
    )  # fmt: skip


EFFORT = "{% for message in messages %}{{ message.content }}{% endfor %}[{{ reasoning_effort }}]"
SWITCH = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}[quick]{% endif %}"
)


def folder_with(template: str, model_folder: Path, folder: Path) -> Path:
    """The model with another chat template."""
    for file in model_folder.iterdir():
        (folder / file.name).write_text(file.read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def prompt_of(gateway: ScriptedGateway, model_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """The prompt that a request with these fields has, by a template."""

    async def ask(template: str, path: str, **fields: Any) -> str:
        tokenizer = HubTokenizer(folder_with(template, model_folder, tmp_path))
        app: FastAPI = create_app(gateway, tokenizer, registry=CollectorRegistry())
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            answer = await client.post(path, json={**BODIES[path], **fields})
        assert answer.status_code == 200, answer.text
        return tokenizer.decode(gateway.requests[-1].prompt_token_ids)

    return ask


@pytest.mark.parametrize(
    ("template", "fields", "prompt"),
    [
        (EFFORT, {"reasoning_effort": "low"}, "Hi[low]"),
        (EFFORT, {}, "Hi[]"),
        (
            EFFORT,
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "Hi[high]",
        ),
        (SWITCH, {"reasoning_effort": "none"}, "Hi[quick]"),
        (SWITCH, {"reasoning_effort": "low"}, "Hi"),
        (
            SWITCH,
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "Hi",
        ),
    ],
)
async def test_a_template_with_a_switch_for_the_effort_is_told_of_it(
    prompt_of: Callable[..., Any], template: str, fields: dict[str, Any], prompt: str
) -> None:
    assert await prompt_of(template, "/v1/chat/completions", **fields) == prompt
    if effort := fields.pop("reasoning_effort", None):
        fields["reasoning"] = {"effort": effort}
    assert await prompt_of(template, "/v1/responses", **fields) == prompt


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"enable_thinking": False}, "Hi[quick]"),
        ({"enable_thinking": True}, "Hi"),
        ({"enable_thinking": None}, "Hi"),
        ({"enable_thinking": False, "chat_template_kwargs": {"mood": "calm"}}, "Hi[quick]"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "Hi"),
    ],
)
async def test_the_switch_for_thoughts_is_taken_at_the_top_of_a_body_too(
    prompt_of: Callable[..., Any], fields: dict[str, Any], prompt: str
) -> None:
    assert await prompt_of(SWITCH, "/v1/chat/completions", **fields) == prompt


async def test_two_switches_for_thoughts_that_differ_are_refused(
    client: httpx.AsyncClient,
) -> None:
    fields = {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}
    path = "/v1/chat/completions"
    answer = await client.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 400
    assert "differ; send one" in answer.json()["error"]["message"]
