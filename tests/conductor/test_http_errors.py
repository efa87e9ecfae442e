"""What a client reads when something is wrong: always OpenAI's shape, always to the point."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from halfmoon_conductor.api.openai.chat_messages import ChatMessage
from halfmoon_conductor.api.openai.openai_requests import ChatRequest, CompletionRequest
from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    ServerOverloaded,
    ServiceUnavailable,
)
from halfmoon_conductor.http_server.body_receiver import BodyLimits
from halfmoon_conductor.routes.rest_app import RestLimits, create_app
from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.nightly import by_day

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT: dict[str, Any] = {"model": "lab/moon", "prompt": "Say it"}
HELLO: dict[str, Any] = {"model": "lab/moon", "messages": [{"role": "user", "content": "Hello"}]}
SECRET = "the password is swordfish"
Events = Callable[[str], list[Any]]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body: dict[str, Any] = answer.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    return error


@pytest.fixture
async def small_client(
    gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> AsyncIterator[httpx.AsyncClient]:
    """Of a front that takes bodies of up to 500 bytes."""
    limits = RestLimits(bodies=BodyLimits(max_bytes=500))
    app = create_app(gateway, tokenizer, registry=CollectorRegistry(), limits=limits)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "change", "param", "told"),
    [
        (COMPLETIONS, {"max_tokens": "16"}, "max_tokens", "valid integer, got '16'"),
        (COMPLETIONS, {"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        (COMPLETIONS, {"max_tokens": True}, "max_tokens", "valid integer"),
        (COMPLETIONS, {"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        (COMPLETIONS, {"top_p": 0}, "top_p", "greater than 0"),
        (COMPLETIONS, {"seed": 2**63}, "seed", "less than or equal to"),
        (COMPLETIONS, {"stream": "yes"}, "stream", "valid boolean"),
        (COMPLETIONS, {"prompt": 7}, "prompt", "a string or a list of token ids"),
        (COMPLETIONS, {"prompt": []}, "prompt", "at least 1 item"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt[1]", "valid integer"),
        (COMPLETIONS, {"prompt": [1, -1]}, "prompt[1]", "greater than or equal to 0"),
        (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt", "at most 128"),
        (COMPLETIONS, {"prompt": [[1], []]}, "prompt[1]", "at least 1 item"),
        (COMPLETIONS, {"prompt": [[1], [100_000]]}, "prompt[1]", "token id 100000"),
        (COMPLETIONS, {"n": 0}, "n", "greater than or equal to 1"),
        (COMPLETIONS, {"n": True}, "n", "valid integer"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs", "less than or equal to 20"),
        (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias", "no token id"),
        (COMPLETIONS, {"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        (COMPLETIONS, {"logit_bias": {"50256": -100}}, "logit_bias", "token id 50256"),
        (COMPLETIONS, {"prompt": [1, 100_000]}, "prompt", "token id 100000"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt", "surrogate"),
        (COMPLETIONS, {"cache_salt": "\ud800"}, "cache_salt", "unicode"),
        (COMPLETIONS, {"stop": ["a", ""]}, "stop[1]", "at least 1 character"),
        (COMPLETIONS, {"stop": ["a"] * 17}, "stop", "at most 16"),
        (COMPLETIONS, {"stop": 3}, "stop", "a string or a list of strings"),
        (COMPLETIONS, {"stream_options": {"include_usage": 1}, "stream": True},
         "stream_options.include_usage", "valid boolean"),
        (COMPLETIONS, {"temprature": 1}, "temprature", "not known here"),
        (COMPLETIONS, {"messages": []}, "messages", "not known here"),
        (CHAT, {"messages": []}, "messages", "at least 1 item"),
        (CHAT, {"messages": "Hello"}, "messages", "valid list"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content",
         "a string or a list of text parts"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'user'"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood",
         "not known here"),
    ],
)  # fmt: skip
async def test_a_wrong_field_is_named(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    path: str,
    change: dict[str, Any],
    param: str,
    told: str,
) -> None:
    body = {**(HELLO if path == CHAT else PROMPT), **change}
    answer = await client.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    error = error_of(answer, 400)
    assert error["param"] == param
    assert told in error["message"]
    assert error["message"].startswith((param, "The prompt"))
    assert error["type"] == "invalid_request_error"
    assert not gateway.requests


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=[]), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@settings(max_examples=by_day(25, at_night=300))
@given(data=st.data())
async def test_no_json_makes_the_front_fail(client: httpx.AsyncClient, data: st.DataObject) -> None:
    shape, path, base = data.draw(
        st.sampled_from([(CompletionRequest, COMPLETIONS, PROMPT), (ChatRequest, CHAT, HELLO)])
    )
    names = st.sampled_from([*shape.model_fields, "unknown"])
    message = st.dictionaries(st.sampled_from([*ChatMessage.model_fields, "x"]), JSON)
    change = data.draw(st.dictionaries(names, JSON | st.lists(message, max_size=2), max_size=3))
    answer = await client.post(
        path,
        content=json.dumps({**base, **change}),
        headers={"content-type": "application/json"},
    )
    if answer.status_code != 200:
        assert error_of(answer, answer.status_code)["message"]
        assert answer.status_code in (400, 404)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (COMPLETIONS, {"best_of": 3}),
        (CHAT, {"echo": True}),
        (COMPLETIONS, {"suffix": "end"}),
        (CHAT, {"modalities": ["audio"]}),
        (CHAT, {"web_search_options": {"search_context_size": "low"}}),
        (CHAT, {"chat_template": "{{ messages }}"}),
    ],
)
async def test_what_is_known_and_not_supported_is_refused_by_name(
    client: httpx.AsyncClient, path: str, change: dict[str, Any]
) -> None:
    base = HELLO if path == CHAT else PROMPT
    error = error_of(await client.post(path, json={**base, **change}), 400)
    (name,) = change
    assert error["param"] == name
    assert error["code"] == "not_supported"
    assert f"{name} is not supported yet" in error["message"]


async def test_an_image_in_a_message_is_refused_where_it_is(client: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    body = {**HELLO, "messages": [{"role": "user", "content": parts}]}
    error = error_of(await client.post(CHAT, json=body), 400)
    assert error["param"] == "messages[0].content[1].type"
    assert '"image_url"' in error["message"]
    assert "not supported" in error["message"]


@pytest.mark.parametrize(
    ("change", "param", "told"),
    [
        (
            {"max_tokens": 3, "max_completion_tokens": 4},
            "max_completion_tokens",
            "max_completion_tokens differ",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "is 4, over max_tokens, which is 3"),
        (
            {"max_completion_tokens": 3, "min_tokens": 4},
            "min_tokens",
            "is 4, over max_completion_tokens, which is 3",
        ),
        ({"min_tokens": 17}, "min_tokens", "min_tokens is 17"),
        ({"max_tokens": 0}, "max_tokens", "only for echo"),
        ({"prompt": ["a", "b"], "n": 65}, "n", "130, over the 128"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "can't be streamed"),
    ],
)
async def test_fields_that_contradict_each_other_are_refused_by_name(
    client: httpx.AsyncClient, change: dict[str, Any], param: str, told: str
) -> None:
    error = error_of(await client.post(COMPLETIONS, json={**PROMPT, **change}), 400)
    assert error["param"] == param
    assert told in error["message"]


@pytest.mark.parametrize(
    ("prompts", "param"),
    [
        (["a", "b" * 300], "prompt[1]"),
        (["a", "\ud800"], "prompt[1]"),
        (["a", "b", ""], "prompt[2]"),
        ([[1], [2, 100_000]], "prompt[1]"),
        ([[1], [2], [3] * 300], "prompt[2]"),
        ([[1], []], "prompt[1]"),
        ([[1, -1]], "prompt[0][1]"),
        ("", "prompt"),
        ([1, 100_000], "prompt"),
        ([3] * 300, "prompt"),
    ],
)
async def test_a_bad_prompt_of_several_is_named_by_its_place(
    client: httpx.AsyncClient, prompts: Any, param: str
) -> None:
    content = json.dumps({**PROMPT, "prompt": prompts})
    headers = {"content-type": "application/json"}
    error = error_of(await client.post(COMPLETIONS, content=content, headers=headers), 400)
    assert error["param"] == param
    if "[" in param:
        assert param in error["message"]


async def test_a_prompt_that_no_worker_can_hold_is_named_by_its_place(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.refusal = ContextLengthExceeded("no worker holds it")
    error = error_of(await client.post(COMPLETIONS, json={**PROMPT, "prompt": ["a", "b"]}), 400)
    assert error["param"] in ("prompt[0]", "prompt[1]")
    assert error["message"] == f"{error['param']}: no worker holds it"
    error = error_of(await client.post(COMPLETIONS, json={**PROMPT, "n": 2}), 400)
    assert error["message"] == "no worker holds it"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_stop_tokens_beyond_the_vocabulary_are_refused(
    client: httpx.AsyncClient, path: str
) -> None:
    body = {**(HELLO if path == CHAT else PROMPT), "stop_token_ids": [1, 100_000]}
    error = error_of(await client.post(path, json=body), 400)
    assert error["param"] == "stop_token_ids"
    assert "100000" in error["message"]


TOOL = {"type": "function", "function": {"name": "rise"}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {**HELLO, "max_tokens": 0}, "max_tokens"),
        (CHAT, {**HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {**HELLO, "tools": [TOOL, TOOL]}, "tools"),
        (CHAT, {**HELLO, "tool_choice": "required"}, "tool_choice"),
        (
            CHAT,
            {**HELLO, "tool_choice": {"type": "function", "function": {"name": "set"}}},
            "tool_choice",
        ),
        (
            CHAT,
            {**HELLO, "enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "enable_thinking",
        ),
        (
            "/tokenize",
            {**HELLO, "enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "enable_thinking",
        ),
        ("/tokenize", {**HELLO, "tools": [TOOL, TOOL]}, "tools"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
    ],
)
async def test_a_contradiction_names_its_field_in_each_api(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    assert error_of(await client.post(path, json=body), 400)["param"] == param


@pytest.mark.parametrize(
    ("content", "content_type", "told"),
    [
        (b'{"model": ', "application/json", "not valid JSON"),
        (b"[1, 2]", "application/json", "must be a JSON object"),
        (b"null", "application/json", "must be a JSON object"),
        (b"", "application/json", "must be a JSON object"),
        (b'{"model": "lab/moon", "prompt": "a"}', "text/plain", "Content-Type"),
        (b'{"model": "lab/moon", "prompt": "a"}', "application/x-www-form-urlencoded", "Content-T"),
        (b"\xff\xfe\xfa", "application/json", "pars"),
        (b"[" * 100_000, "application/json", "200 levels"),
        (b"[" * 1_000, "application/json", "200 levels"),
        (b'{"model": "lab/moon", "prompt": "a", "temperature": NaN}', "application/json", "finite"),
        (b'{"model": "lab/moon", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
         "application/json", "pars"),
    ],
)  # fmt: skip
async def test_a_body_that_cannot_be_read_is_refused(
    client: httpx.AsyncClient, content: bytes, content_type: str, told: str
) -> None:
    answer = await client.post(COMPLETIONS, content=content, headers={"content-type": content_type})
    assert told in error_of(answer, 400)["message"]


WIDE = '"stop": "' + 20_000 * "x" + '", '


@pytest.mark.parametrize(
    ("path", "content", "key"),
    [
        (COMPLETIONS, '{"prompt": "a", "max_tokens": 1, "max_tokens": 2}', "max_tokens"),
        (COMPLETIONS, '{"prompt": "a", "max_tokens": 1, "max\\u005ftokens": 2}', "max_tokens"),
        (COMPLETIONS, '{"prompt": "a", "prompt" \n:"a"}', "prompt"),
        (COMPLETIONS, '{"prompt": "a", "logit_bias": {"7": 1, "8": 1, "7": 2}}', "7"),
        (COMPLETIONS, '{"prompt": "a", "a\\\\": 1, "a\\\\": 2}', "a\\"),
        (COMPLETIONS, '{"prompt": "a", "' + 9000 * "k" + '": 1, "' + 9000 * "k" + '": 2}', "kkk"),
        (CHAT, '{"messages": [{"role": "user", "content": "a", "content": "\\":"}]}', "content"),
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], ' + WIDE + '"n": 1, "n": 1}', "n"),
        ("/v1/responses", '{"input": "a", "input": "b"}', "input"),
        (
            "/v1/responses",
            '{"previous_response_id": "resp_1", "input": "a", "input": "b"}',
            "input",
        ),
        ("/v1/messages", '{"messages": [], "max_tokens": 1, "messages": []}', "messages"),
        ("/v1/messages/count_tokens", '{"messages": [], "messages": []}', "messages"),
        ("/tokenize", '{"prompt": "a", "prompt": "b"}', "prompt"),
        ("/detokenize", '{"tokens": [], "tokens": [1]}', "tokens"),
    ],
)
async def test_a_key_that_is_twice_in_an_object_is_refused_by_name(
    client: httpx.AsyncClient, path: str, content: str, key: str
) -> None:
    content = '{"model": "lab/moon", ' + content[1:]
    answer = await client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "twice in one object" in message
    assert key in message
    assert len(message) < 300


@pytest.mark.parametrize(
    "text", ['": "', '{"a": 1, "a": 2}', "\\", ':":', '"\n: ', "\u00e9\U0001f317" + 30 * '":']
)
async def test_texts_that_look_like_keys_are_texts(client: httpx.AsyncClient, text: str) -> None:
    for prompt in (text, text * 900):
        body = {**PROMPT, "prompt": prompt, "user": text, "max_tokens": 1}
        answer = await client.post(COMPLETIONS, json=body)
        assert "twice" not in answer.text


async def test_an_unknown_field_is_told_even_if_its_name_cannot_be(
    client: httpx.AsyncClient,
) -> None:
    content = b'{"model": "lab/moon", "prompt": "a", "mo\\ud800on": 1}'
    answer = await client.post(
        COMPLETIONS, content=content, headers={"content-type": "application/json"}
    )
    assert error_of(answer, 400)["param"] == "mo?on"


async def test_a_field_that_is_left_out_is_named(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(COMPLETIONS, json={"model": "lab/moon"}), 400)
    assert error["param"] == "prompt"
    assert error["message"] == "prompt is required."


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, HELLO)])
async def test_another_model_is_not_found(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    error = error_of(await client.post(path, json={**body, "model": "lab/sun"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "lab/sun" in error["message"]
    assert "lab/moon" in error["message"]
    error = error_of(await client.get("/v1/models/lab/sun"), 404)
    assert error["code"] == "model_not_found"


async def test_routes_and_methods_that_do_not_exist_are_named(client: httpx.AsyncClient) -> None:
    error = error_of(await client.get("/v1/nothing"), 404)
    assert "/v1/nothing" in error["message"]
    answer = await client.get(COMPLETIONS)
    assert "GET" in error_of(answer, 405)["message"]
    assert answer.headers["allow"] == "POST"
    # Its methods have a route each.
    assert (await client.patch("/v1/responses/1")).headers["allow"] == "DELETE, GET, HEAD"
    error_of(await client.get("/v1/models/"), 404)


async def test_a_route_of_openais_that_is_not_here_is_answered_with_those_that_are(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.post("/v1/embeddings", json={"model": "lab/moon", "input": "Hello"})
    message = error_of(answer, 404)["message"]
    paths = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/models", "/openapi.json"
    assert all(path in message for path in ("/v1/embeddings", *paths))
    assert "/debug" not in message and "/metrics" not in message
    assert "/v1/models" not in error_of(await client.get("/nothing"), 404)["message"]


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_limit_is_refused(
    small_client: httpx.AsyncClient, gateway: ScriptedGateway, announced: bool
) -> None:
    body = json.dumps({**PROMPT, "prompt": "x" * 600}).encode()

    async def in_pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    answer = await small_client.post(
        COMPLETIONS,
        content=body if announced else in_pieces(),
        headers={"content-type": "application/json"},
    )
    error = error_of(answer, 413)
    assert "500 bytes" in error["message"]
    assert answer.headers["connection"] == "close"
    assert answer.headers["x-request-id"]
    assert not gateway.requests
    assert (await small_client.post(COMPLETIONS, json=PROMPT)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {**PROMPT, "prompt": [70] * 150, "max_tokens": 51}, "prompt"),
        (COMPLETIONS, {**PROMPT, "prompt": [70] * 200}, "prompt"),
        (CHAT, {**HELLO, "max_completion_tokens": 200}, "messages"),
        (CHAT, {**HELLO, "messages": [{"role": "user", "content": "半" * 300}]}, "messages"),
    ],
)
async def test_more_than_the_context_holds_is_refused_with_the_numbers(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    error = error_of(await client.post(path, json=body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "context is 200 tokens" in error["message"]


async def test_a_model_without_a_chat_template_sends_clients_to_completions(
    gateway: ScriptedGateway, model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    app = create_app(gateway, HubTokenizer(tmp_path), registry=CollectorRegistry())
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        error = error_of(await client.post(CHAT, json=HELLO), 400)
    assert "no chat template" in error["message"]
    assert COMPLETIONS in error["message"]


async def test_half_a_surrogate_pair_in_a_template_variable_is_refused(card: ModelCard) -> None:
    tokenizer = FakeTokenizer()
    tokenizer.chat_templates = {"default": "{{ mood }}"}
    app = create_app(ScriptedGateway(model=card), tokenizer, registry=CollectorRegistry())
    transport = httpx.ASGITransport(app=app)
    body = json.dumps({**HELLO, "chat_template_kwargs": {"mood": "\ud800"}})
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert "not Unicode text" in error_of(answer, 400)["message"]


async def test_what_the_chat_template_refuses_is_told(client: httpx.AsyncClient) -> None:
    messages = [*HELLO["messages"], {"role": "system", "content": "late"}]
    error = error_of(await client.post(CHAT, json={**HELLO, "messages": messages}), 400)
    assert "a system message must be the first one" in error["message"]
    assert error["param"] == "messages"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "retry_after"),
    [
        (ServerOverloaded("TTFT would be 9 s", retry_after_s=2.2), 429, "3"),
        (ServerOverloaded("soon", retry_after_s=0.0), 429, "1"),
        (ServiceUnavailable("no live decode worker", retry_after_s=5), 503, "5"),
        (ContextLengthExceeded("no decode worker holds 300 tokens"), 400, None),
        (GenerationFailed("nobody is left"), 500, None),
    ],
)
async def test_a_refusal_before_the_first_token_has_its_status_even_for_a_stream(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    stream: bool,
    refusal: Exception,
    status: int,
    retry_after: str | None,
) -> None:
    gateway.refusal = refusal
    answer = await client.post(COMPLETIONS, json={**PROMPT, "stream": stream})
    assert error_of(answer, status)["message"] == str(refusal)
    assert answer.headers.get("retry-after") == retry_after


async def test_nobody_has_joined_yet(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.card = None
    for path, body in ((COMPLETIONS, PROMPT), (CHAT, HELLO)):
        answer = await client.post(path, json=body)
        assert error_of(answer, 503)["code"] == "unavailable"
        assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, HELLO)])
async def test_a_stream_that_fails_ends_in_an_error_event(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    events_of: Events,
    path: str,
    body: dict[str, Any],
) -> None:
    gateway.failure = GenerationFailed("decode-0 died and nobody is left")
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200
    *chunks, last = events_of(answer.text)
    assert chunks
    assert last["error"]["message"] == "decode-0 died and nobody is left"
    assert last["error"]["code"] == "generation_failed"


async def test_an_answer_that_fails_is_an_error_when_it_is_not_streamed(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.failure = GenerationFailed("decode-0 died and nobody is left")
    error = error_of(await client.post(COMPLETIONS, json=PROMPT), 500)
    assert error["message"] == "decode-0 died and nobody is left"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_mistake_of_ours_tells_nothing_of_our_inside(
    client: httpx.AsyncClient, gateway: ScriptedGateway, events_of: Events, stream: bool
) -> None:
    gateway.refusal = RuntimeError(SECRET)
    answer = await client.post(COMPLETIONS, json={**PROMPT, "stream": stream})
    assert SECRET not in json.dumps(error_of(answer, 500))
    assert answer.headers["x-request-id"]
    gateway.refusal, gateway.failure = None, RuntimeError(SECRET)
    answer = await client.post(COMPLETIONS, json={**PROMPT, "stream": stream})
    assert SECRET not in answer.text
    error = events_of(answer.text)[-1]["error"] if stream else error_of(answer, 500)
    assert error["type"] == "server_error"


async def test_a_generation_that_just_stops_is_a_failure_and_not_an_answer(
    client: httpx.AsyncClient, gateway: ScriptedGateway, events_of: Events
) -> None:
    gateway.falls_silent = True
    answer = await client.post(COMPLETIONS, json={**PROMPT, "stream": True})
    assert "without saying why" in events_of(answer.text)[-1]["error"]["message"]


async def test_endings_are_counted_by_their_reason(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.refusal = ServerOverloaded("full", retry_after_s=1)
    await client.post(COMPLETIONS, json=PROMPT)
    gateway.refusal, gateway.failure = None, GenerationFailed("gone")
    await client.post(COMPLETIONS, json=PROMPT)
    lines = (await client.get("/metrics")).text.splitlines()
    assert 'halfmoon_request_success_total{finished_reason="error"} 1.0' in lines
    assert not any(line.startswith("halfmoon_request_success_total") and "refused" in line
                   for line in lines)  # fmt: skip
    assert 'halfmoon_http_requests_total{route="/v1/completions",status="429"} 1.0' in lines
