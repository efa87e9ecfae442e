"""What clients ask of an answer's form becomes one grammar, or a 400 that names the field."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway

CHAT = {"model": "lab/moon", "messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={**CHAT, **fields})


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("fields", "taken", "refused"),
    [
        ({"response_format": {"type": "json_object"}}, '{"b": [1]}', "[1]"),
        ({"response_format": schema_format(SCHEMA, strict=True)}, '{"a": 1}', '{"b": 1}'),
        ({"response_format": schema_format(SCHEMA)}, '{\n  "a": 1\n}', '{"a": 1, "b": 2}'),
        ({"guided_json": SCHEMA}, '{"a":1}', '{"a":"1"}'),
        ({"guided_json": json.dumps(SCHEMA)}, '{"a":1}', '{"a":"1"}'),
        ({"guided_regex": "a/b+|[0-9]{2}"}, "a/bb", "123"),
        ({"guided_regex": "^moon$"}, "moon", "the moon"),
        ({"guided_choice": ["half 半", 'qu"ote\n']}, 'qu"ote\n', "half"),
        ({"guided_choice": ["half 半"]}, "half 半", "half"),
        ({"guided_grammar": 'start: "a" b*\nb: "b"'}, "abb", "ba"),
        ({"guided_grammar": 'root ::= "a" b*\nb ::= "b"'}, "abb", "ba"),
        ({"structured_outputs": {"json": SCHEMA}}, '{"a":1}', "{}"),
        ({"structured_outputs": {"regex": "a+"}}, "aaa", "ab"),
        ({"structured_outputs": {"choice": ["x", "y"]}}, "y", "xy"),
        ({"structured_outputs": {"grammar": "start: /x/ /y/"}}, "xy", "x"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
    ],
)
async def test_a_wish_becomes_a_grammar_of_exactly_such_texts(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    accepts: Callable[[str, str], bool],
    fields: dict[str, Any],
    taken: str,
    refused: str,
) -> None:
    assert (await ask(client, **fields)).status_code == 200
    (request,) = gateway.requests
    assert accepts(request.sampling.grammar, taken)
    assert not accepts(request.sampling.grammar, refused)


async def test_a_text_format_asks_for_nothing(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    assert (await ask(client, response_format={"type": "text"})).status_code == 200
    assert gateway.requests[0].sampling.grammar == ""


def chain(n: int) -> dict[str, Any]:
    """Definitions that lead to one another, one after the other."""
    links = {f"d{i}": {"properties": {"p": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(n)}
    return {"$defs": {**links, f"d{n}": {}}, "$ref": "#/$defs/d0"}


def nested(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(n):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format", "not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": schema_format({"type": "foo"})}, "response_format", "foo"),
        ({"response_format": schema_format({"not": {}})}, "response_format", "not"),
        ({"guided_json": "[1"}, "guided_json", "can't be used"),
        ({"guided_json": "[1]"}, "guided_json", "not a JSON object"),
        ({"guided_json": "{" + " " * 300_000 + "}"}, "guided_json", "over the 262144"),
        ({"guided_json": {"enum": ["\ud800"]}}, "guided_json", "not Unicode text"),
        ({"guided_json": {"x-guidance": 1}}, "guided_json", "x-guidance"),
        ({"guided_json": chain(200)}, "guided_json", "over the 128"),
        ({"guided_json": nested(150)}, "guided_json", "recursion"),
        ({"guided_json": {"description": "x" * 70_000}}, "guided_json", "65536"),
        ({"guided_json": {"$ref": "file:///etc/hostname"}}, "guided_json", "does not compile"),
        ({"guided_regex": "("}, "guided_regex", "unclosed"),
        ({"guided_regex": "a(?=b)"}, "guided_regex", "look-"),
        ({"guided_grammar": "start: ("}, "guided_grammar", "does not compile"),
        ({"guided_grammar": "start: " + '"a" ' * 4000}, "guided_grammar", "over the 3000"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "has 2"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "send one of them"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "send one of them",
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "leave out"),
    ],
)
async def test_what_can_not_be_had_is_refused_by_name_and_nothing_is_spent(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    fields: dict[str, Any],
    param: str,
    words: str,
) -> None:
    # By hand: httpx would not write half of a surrogate pair.
    answer = await client.post(
        "/v1/chat/completions",
        content=json.dumps({**CHAT, **fields}),
        headers={"content-type": "application/json"},
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]
    assert not gateway.requests


async def test_a_fake_model_has_no_texts_to_keep_to_a_grammar(
    card: ModelCard, gateway: ScriptedGateway
) -> None:
    app = create_app(gateway, FakeTokenizer(), registry=CollectorRegistry())
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        answer = await ask(client, guided_regex="a")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (
        400, "guided_regex", "not_supported",
    )  # fmt: skip
    assert not gateway.requests
