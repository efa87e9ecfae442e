"""/openapi.json is valid, and says what the front does."""

import json
import re
from typing import Any

import jsonschema
import pytest

from halfmoon_conductor.tenants import Tenants
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.conductor.fronts import CHAT, COMPLETIONS, Front, open_front


@pytest.fixture
async def document(front: Front) -> dict[str, Any]:
    document: dict[str, Any] = (await front.get("/openapi.json")).json()
    return document


def schema_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}", "components": document["components"]}


async def test_every_schema_is_valid_and_every_reference_leads_somewhere(
    document: dict[str, Any],
) -> None:
    assert document["openapi"].startswith("3.1")
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document)):
        found: Any = document
        for step in reference.split("/"):
            found = found[step]


async def test_all_routes_and_their_errors_are_there(document: dict[str, Any]) -> None:
    assert set(document["paths"]) == {
        COMPLETIONS, CHAT, "/v1/responses", "/v1/responses/{response_id}", "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize", "/detokenize",
        "/v1/models", "/v1/models/{model}", "/health", "/ready", "/metrics",
        "/ping", "/version", "/load",
    }  # fmt: skip
    for path in (COMPLETIONS, CHAT):
        responses = document["paths"][path]["post"]["responses"]
        assert set(responses) == {"200", "400", "401", "404", "413", "429", "500", "503", "4XX"}
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
        for status in set(responses) - {"200"}:
            content = responses[status]["content"]["application/json"]
            assert content["schema"] == {"$ref": "#/components/schemas/ErrorResponse"}
    assert "422" not in json.dumps(document["paths"])
    assert set(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {
        "text/plain"
    }


async def test_the_schema_says_where_a_key_is_asked_for_if_one_is(
    document: dict[str, Any], gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    assert "security" not in json.dumps(document)
    async with open_front(gateway, tokenizer, tenants=Tenants(())) as front:
        with_keys = (await front.get("/openapi.json")).json()
        for path, operations in with_keys["paths"].items():
            for method, operation in operations.items():
                answer = await front.client.request(method, path)
                schemes = {name for each in operation.get("security", []) for name in each}
                assert schemes == ({"bearer", "x-api-key"} if answer.status_code == 401 else set())
    assert set(with_keys["components"]["securitySchemes"]) == {"bearer", "x-api-key"}


COMPLETION_CHANGES: list[dict[str, Any]] = [
    {}, {"prompt": "a"}, {"prompt": [1, 2]}, {"prompt": ["a"]}, {"prompt": [[1]]},
    {"prompt": []}, {"prompt": ["a", "b"]}, {"prompt": [-1]}, {"prompt": 1}, {"prompt": None},
    {"n": 1}, {"n": 2}, {"n": 129}, {"n": None}, {"echo": False}, {"echo": True}, {"logprobs": 1},
    {"logprobs": 21}, {"logit_bias": {"7": 1}}, {"logit_bias": {"7": 101}}, {"best_of": 2},
    {"logit_bias": {"x": 1}}, {"prompt": ["a"] * 129}, {"prompt": [[1], []]},
    {"stop": "a"}, {"stop": ["a"]}, {"stop": ""}, {"stop": ["a"] * 17}, {"stop": None},
    {"temperature": 0}, {"temperature": 2.5}, {"temperature": "1"}, {"top_p": 0}, {"top_k": -1},
    {"max_tokens": -1}, {"max_tokens": 1}, {"seed": -1}, {"seed": 2**64}, {"user": "me"},
    {"stream": True}, {"stream": 1}, {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"usage": True}}, {"unknown": 1}, {"model": None},
    {"response_format": {"type": "text"}}, {"response_format": {"type": "json"}},
    {"stop_token_ids": [1] * 129}, {"min_tokens": -1}, {"ttft_slo_s": 0}, {"logit_bias": {}},
    {"cache_salt": "x" * 1025}, {"cache_salt": "x"},
]  # fmt: skip
TEXT_PART = {"type": "text", "text": "a"}
CHAT_CHANGES: list[dict[str, Any]] = [
    {}, {"messages": []}, {"tools": []}, {"tools": [{}]},
    {"messages": [{"role": "user", "content": [TEXT_PART]}]},
    {"messages": [{"role": "user", "content": [TEXT_PART | {"type": "image_url"}]}]},
    {"messages": [{"role": "user", "content": [TEXT_PART | {"more": 1}]}]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "bot", "content": "a"}]},
    {"messages": [{"role": "assistant", "content": None}]},
    {"messages": [{"role": "assistant", "content": "a", "refusal": None, "tool_calls": []}]},
    {"tool_choice": "auto"}, {"tool_choice": "none"}, {"chat_template_kwargs": {"a": [1]}},
]  # fmt: skip
BODIES = [
    *(("CompletionRequest", change) for change in COMPLETION_CHANGES),
    *(("ChatRequest", change) for change in CHAT_CHANGES),
]


async def test_the_schema_takes_what_the_front_takes(
    front: Front, document: dict[str, Any]
) -> None:
    disagreements: list[Any] = []
    for name, change in BODIES:
        base = {"messages": [{"role": "user", "content": "a"}]}
        path = CHAT if name == "ChatRequest" else COMPLETIONS
        body = {"model": "lab/moon", **(base if path == CHAT else {"prompt": "a"}), **change}
        answer = await front.post(path, body)
        valid = jsonschema.Draft202012Validator(schema_of(document, name)).is_valid(body)
        assert answer.status_code in (200, 400, 404), body
        if valid != (answer.status_code == 200):
            disagreements.append((body, answer.text))
    assert not disagreements


async def test_answers_are_as_the_schema_says(front: Front, document: dict[str, Any]) -> None:
    for name, answer in [
        ("TextCompletion", await front.post(COMPLETIONS)),
        ("ChatCompletion", await front.post(CHAT)),
        ("ModelList", await front.get("/v1/models")),
        ("Model", await front.get("/v1/models/lab/moon")),
        ("Health", await front.get("/health")),
        ("Readiness", await front.get("/ready")),
        ("ErrorResponse", await front.get("/v1/models/none")),
    ]:
        jsonschema.validate(answer.json(), schema_of(document, name))
