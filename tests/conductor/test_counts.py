"""How many of each thing a body may have: the limit is named, and what is below it is served."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.nightly import by_day

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, COUNT, TOKENIZE = "/v1/messages", "/v1/messages/count_tokens", "/tokenize"
USER = {"role": "user", "content": ""}
HELLO = {"model": "lab/moon", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
PART = {"type": "text", "text": ""}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}


def functions(n: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}"}} for i in range(n)]


@pytest.fixture
async def wide(
    gateway: ScriptedGateway, tokenizer: HubTokenizer, card: ModelCard
) -> AsyncIterator[httpx.AsyncClient]:
    """The REST API of a model whose context has room for many turns."""
    gateway.card = msgspec.structs.replace(card, max_context=1_000_000)
    app = create_app(gateway, tokenizer, registry=CollectorRegistry(), tool_call_parser="hermes")
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        yield client


# The path, the field, the most of it, and a body with so many.
COUNTED: list[tuple[str, str, int, Any]] = [
    (CHAT, "messages", 4096, lambda n: {"messages": [USER] * n}),
    (CHAT, "messages[0].content", 1024, lambda n: {"messages": [{**USER, "content": [PART] * n}]}),
    (CHAT, "messages[0].tool_calls", 128,
     lambda n: {"messages": [{"role": "assistant", "tool_calls": [CALL] * n}, USER]}),
    (CHAT, "tools", 128, lambda n: {"tools": functions(n)}),
    (CHAT, "stop", 16, lambda n: {"stop": ["§"] * n}),
    (CHAT, "stop_token_ids", 128, lambda n: {"stop_token_ids": [400] * n}),
    (CHAT, "chat_template_kwargs", 64,
     lambda n: {"chat_template_kwargs": {f"v{i}": "" for i in range(n)}}),
    (COMPLETIONS, "prompt", 128, lambda n: {"prompt": ["a"] * n}),
    (COMPLETIONS, "prompt", 128, lambda n: {"prompt": [[5]] * n}),
    (RESPONSES, "input", 4095, lambda n: {"input": [USER] * n, "instructions": "a"}),
    (RESPONSES, "input[0].content", 1024,
     lambda n: {"input": [{**USER, "content": [{**PART, "type": "input_text"}] * n}]}),
    (MESSAGES, "messages", 4095, lambda n: {"messages": [USER] * n, "system": "a"}),
    (MESSAGES, "messages[0].content", 1024,
     lambda n: {"messages": [{**USER, "content": [PART] * n}]}),
    (MESSAGES, "system", 1024, lambda n: {"system": [PART] * n}),
    (COUNT, "messages", 4095, lambda n: {"messages": [USER] * n, "system": "a"}),
    (TOKENIZE, "messages", 4096, lambda n: {"messages": [USER] * n}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "param", "most", "body_of"), COUNTED)
async def test_a_count_is_bounded_and_its_limit_is_named(
    wide: httpx.AsyncClient, path: str, param: str, most: int, body_of: Any
) -> None:
    body: dict[str, Any] = {"model": "lab/moon", "max_tokens": 2}
    if path in (CHAT, MESSAGES):
        body |= HELLO
    if path == RESPONSES:
        body = {"model": "lab/moon", "max_output_tokens": 2}
    if path in (COUNT, TOKENIZE):
        body = {"model": "lab/moon"}
    accepted = await wide.post(path, json={**body, **body_of(most)})
    assert accepted.status_code == 200, accepted.text
    refused = (await wide.post(path, json={**body, **body_of(most + 1)})).json()["error"]
    assert str(most) in refused["message"]
    if path not in (MESSAGES, COUNT):  # Anthropic's errors have no place for it but the text
        assert refused["param"] == param
    assert param in refused["message"]


async def test_biases_are_bounded(wide: httpx.AsyncClient) -> None:
    body = {"model": "lab/moon", "prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}
    error = (await wide.post(COMPLETIONS, json=body)).json()["error"]
    assert error["param"] == "logit_bias"
    assert "1024" in error["message"]


async def test_turns_that_are_many_messages_each_count_as_these(wide: httpx.AsyncClient) -> None:
    turns = [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT] * 1000}]
    body = {**HELLO, "messages": turns * 5}
    message = (await wide.post(MESSAGES, json=body)).json()["error"]["message"]
    assert "5005" in message
    assert "4095" in message


async def test_all_objects_together_are_bounded(wide: httpx.AsyncClient) -> None:
    body = {**HELLO, "messages": [{**USER, "content": [PART] * 1000}] * 20}
    message = (await wide.post(CHAT, json=body)).json()["error"]["message"]
    assert "20000 objects" in message


#: A hundredth of the bytes of the largest bodies here, which are over what any part may have.
MANY = by_day(12_000, at_night=100_000)


@pytest.mark.parametrize(
    "content",
    [
        b'{"model":"lab/moon","messages":[' + b"{}," * 3 * MANY + b"{}]}",
        b'{"model":"lab/moon","messages":[' + b"0," * 30 * MANY + b"0]}",
        b'{"model":"lab/moon",' + b",".join(b'"x%d":1' % i for i in range(3 * MANY)) + b"}",
        b'{"model":"lab/moon","prompt":"a","logit_bias":{'
        + b",".join(b'"%d":"x"' % i for i in range(3 * MANY)) + b"}}",
        b'{"model":"lab/moon","' + b"x" * 50 * MANY + b'":1}',
        b'{"model":"lab/moon","prompt":"a","stop":"' + b"x" * 50 * MANY + b'"}',
        b'{"model":"' + b"x" * 50 * MANY + b'","prompt":"a"}',
        json.dumps({**HELLO, "messages": [{"role": "x" * 50 * MANY, "content": "a"}]}).encode(),
        json.dumps({**HELLO, "tool_choice": {"x" * 50 * MANY: 1}}).encode(),
        json.dumps({**HELLO, "response_format": {"type": "x" * 50 * MANY}}).encode(),
        b"[" * 50 * MANY,
        b'"' * 50 * MANY,
        b"x" * 50 * MANY,
        b'{"model":"' + b"x" * 9_000 + b'","prompt":"a"}',
        b'{"model":"lab/moon","messages":[{"role":"system","content":"a"},'
        b'{"role":"system","content":"' + b"x" * 9_000 + b'"}]}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES, TOKENIZE, "/detokenize"])
async def test_an_error_is_short_whatever_the_body(
    wide: httpx.AsyncClient, path: str, content: bytes
) -> None:
    headers = {"content-type": "application/json"}
    answer = await wide.post(path, content=content, headers=headers)
    assert 400 <= answer.status_code < 500
    assert len(answer.content) < 1500, answer.text[:300]
