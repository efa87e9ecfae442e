"""What a client reads when something is wrong: always OpenAI's shape, always to the point."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    ServerOverloaded,
    ServiceUnavailable,
)
from halfmoon_conductor.http_server.body_receiver import BodyLimits
from halfmoon_conductor.routes.rest_app import RestLimits
from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.conductor.fronts import (
    CHAT,
    COMPLETIONS,
    COUNT,
    DETOKENIZE,
    HELLO,
    JSON,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    Front,
    error_of,
    open_front,
)

SECRET = "the password is swordfish"
USER = {"role": "user"}
TOOL = {"type": "function", "function": {"name": "rise"}}
SWITCHES = {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(
    ("path", "change", "param", "told"),
    [
        # Wrong values.
        (COMPLETIONS, {"max_tokens": "16"}, "max_tokens", "valid integer, got '16'"),
        (COMPLETIONS, {"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        (COMPLETIONS, {"max_tokens": True}, "max_tokens", "valid integer"),
        (COMPLETIONS, {"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        (COMPLETIONS, {"top_p": 0}, "top_p", "greater than 0"),
        (COMPLETIONS, {"seed": 2**63}, "seed", "less than or equal to"),
        (COMPLETIONS, {"stream": "yes"}, "stream", "valid boolean"),
        (COMPLETIONS, {"n": 0}, "n", "greater than or equal to 1"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs", "less than or equal to 20"),
        (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias", "no token id"),
        (COMPLETIONS, {"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        (COMPLETIONS, {"logit_bias": {"50256": -100}}, "logit_bias", "token id 50256"),
        (COMPLETIONS, {"cache_salt": "\ud800"}, "cache_salt", "unicode"),
        (COMPLETIONS, {"stop": ["a", ""]}, "stop[1]", "at least 1 character"),
        (COMPLETIONS, {"stop": 3}, "stop", "a string or a list of strings"),
        (COMPLETIONS, {"stop_token_ids": [1, 100_000]}, "stop_token_ids", "100000"),
        (COMPLETIONS, {"stream_options": {"include_usage": 1}, "stream": True},
         "stream_options.include_usage", "valid boolean"),
        (COMPLETIONS, {"temprature": 1}, "temprature", "not known here"),
        (CHAT, {"messages": []}, "messages", "at least 1 item"),
        (CHAT, {"messages": [USER]}, "messages[0].content", "is required"),
        (CHAT, {"messages": [{**USER, "content": None}]}, "messages[0].content",
         "a string or a list of text parts"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'user'"),
        (CHAT, {"messages": [{**USER, "content": "x", "mood": 1}]}, "messages[0].mood",
         "not known here"),
        # Prompts, by their places.
        (COMPLETIONS, {"prompt": 7}, "prompt", "a string or a list of token ids"),
        (COMPLETIONS, {"prompt": []}, "prompt", "at least 1 item"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt[1]", "valid integer"),
        (COMPLETIONS, {"prompt": [[1, -1]]}, "prompt[0][1]", "greater than or equal to 0"),
        (COMPLETIONS, {"prompt": [[1], []]}, "prompt[1]", "at least 1 item"),
        (COMPLETIONS, {"prompt": [1, 100_000]}, "prompt", "token id 100000"),
        (COMPLETIONS, {"prompt": [[1], [2, 100_000]]}, "prompt[1]", "token id 100000"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": ["a", "b", ""]}, "prompt[2]", "empty"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt", "surrogate"),
        (COMPLETIONS, {"prompt": ["a", "\ud800"]}, "prompt[1]", "surrogate"),
        # Fields that contradict each other.
        (COMPLETIONS, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens",
         "max_completion_tokens differ"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options",
         "stream: true"),
        (COMPLETIONS, {"max_tokens": 3, "min_tokens": 4}, "min_tokens",
         "is 4, over max_tokens, which is 3"),
        (COMPLETIONS, {"min_tokens": 17}, "min_tokens", "min_tokens is 17"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "only for echo"),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 65}, "n", "130, over the 128"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs",
         "can't be streamed"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", ""),
        (CHAT, {"tools": [TOOL, TOOL]}, "tools", "same name"),
        (CHAT, SWITCHES, "enable_thinking", "differ; send one"),
        (TOKENIZE, {"messages": HELLO, **SWITCHES}, "enable_thinking", "differ; send one"),
        (TOKENIZE, {"prompt": "a", "tools": [TOOL]}, "tools", ""),
        # What is text alone.
        (CHAT, {"messages": [{**USER, "content": [
            {"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[1].type", '"image_url", which is not supported'),
    ],
)  # fmt: skip
async def test_a_wrong_field_is_named(
    front: Front, path: str, change: dict[str, Any], param: str, told: str
) -> None:
    error = await front.refused(path, change)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert told in error["message"]
    assert param in error["message"] or error["message"].startswith("The prompt")


#: Fields that change no answer: taken with any well-formed value, and bounded.
LABELS = ["user", "safety_identifier", "prompt_cache_key", "session_id", "chat_id"]
WORDS = ["prompt_cache_retention", "service_tier"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
async def test_a_label_that_is_malformed_or_too_long_is_refused_by_name(
    front: Front, path: str
) -> None:
    refused: dict[str, list[Any]] = {
        "metadata": [
            {str(i): "x" for i in range(17)}, {"x" * 65: "x"}, {"a": "x" * 513}, {"a": 1},
            {"a": None}, ["a"], {"\ud800": "x"},
        ],
        "store": ["yes", 1],
        "prompt_cache_options": [{"mode": {"deep": []}}],
        **{name: ["x" * 1025, ["x"], "\ud800"] for name in LABELS},
        **{name: ["x" * 65, ["x"], "\ud800", 1] for name in WORDS},
    }  # fmt: skip
    for name, values in refused.items():
        for value in values:
            error = await front.refused(path, {name: value})
            assert error["param"].split(".")[0] == name


async def test_a_field_that_is_left_out_or_has_no_readable_name_is_told(front: Front) -> None:
    answer = await front.send(COMPLETIONS, '{"model": "lab/moon"}')
    error = error_of(answer, 400)
    assert (error["param"], error["message"]) == ("prompt", "prompt is required.")
    content = b'{"model": "lab/moon", "prompt": "a", "mo\\ud800on": 1}'
    assert error_of(await front.send(COMPLETIONS, content), 400)["param"] == "mo?on"


async def test_a_prompt_that_no_worker_can_hold_is_named_by_its_place(front: Front) -> None:
    front.gateway.refusal = ContextLengthExceeded("no worker holds it")
    error = await front.error(COMPLETIONS, 400, prompt=["a", "b"])
    assert error["param"] in ("prompt[0]", "prompt[1]")
    assert error["message"] == f"{error['param']}: no worker holds it"
    assert (await front.error(COMPLETIONS, 400, n=2))["message"] == "no worker holds it"


FINE = b'{"model": "lab/moon", "prompt": "a"'


@pytest.mark.parametrize(
    ("content", "content_type", "told"),
    [
        (b'{"model": ', JSON["content-type"], "not valid JSON"),
        (b"[1, 2]", JSON["content-type"], "must be a JSON object"),
        (b"null", JSON["content-type"], "must be a JSON object"),
        (b"", JSON["content-type"], "must be a JSON object"),
        (FINE + b"}", "text/plain", "Content-Type"),
        (FINE + b"}", "application/x-www-form-urlencoded", "Content-T"),
        (b"\xff\xfe\xfa", JSON["content-type"], "pars"),
        (b"[" * 100_000, JSON["content-type"], "200 levels"),
        (b"[" * 1_000, JSON["content-type"], "200 levels"),
        (FINE + b', "temperature": NaN}', JSON["content-type"], "finite"),
        (FINE + b', "seed": ' + b"9" * 5000 + b"}", JSON["content-type"], "pars"),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused(
    client: httpx.AsyncClient, content: bytes, content_type: str, told: str
) -> None:
    answer = await client.post(COMPLETIONS, content=content, headers={"content-type": content_type})
    assert told in error_of(answer, 400)["message"]


WIDE = '"stop": "' + 20_000 * "x" + '", '


@pytest.mark.parametrize(
    ("path", "content", "key"),
    [
        (COMPLETIONS, '"prompt": "a", "max_tokens": 1, "max_tokens": 2', "max_tokens"),
        (COMPLETIONS, '"prompt": "a", "max_tokens": 1, "max\\u005ftokens": 2', "max_tokens"),
        (COMPLETIONS, '"prompt": "a", "prompt" \n:"a"', "prompt"),
        (COMPLETIONS, '"prompt": "a", "logit_bias": {"7": 1, "8": 1, "7": 2}', "7"),
        (COMPLETIONS, '"prompt": "a", "a\\\\": 1, "a\\\\": 2', "a\\"),
        (COMPLETIONS, '"prompt": "a", "' + 9000 * "k" + '": 1, "' + 9000 * "k" + '": 2', "kkk"),
        (CHAT, '"messages": [{"role": "user", "content": "a", "content": "\\":"}]', "content"),
        (CHAT, '"messages": [{"role": "user", "content": "a"}], ' + WIDE + '"n": 1, "n": 1', "n"),
        (RESPONSES, '"input": "a", "input": "b"', "input"),
        (RESPONSES, '"previous_response_id": "resp_1", "input": "a", "input": "b"', "input"),
        (MESSAGES, '"messages": [], "max_tokens": 1, "messages": []', "messages"),
        (COUNT, '"messages": [], "messages": []', "messages"),
        (TOKENIZE, '"prompt": "a", "prompt": "b"', "prompt"),
        (DETOKENIZE, '"tokens": [], "tokens": [1]', "tokens"),
    ],
)
async def test_a_key_that_is_twice_in_an_object_is_refused_by_name(
    front: Front, path: str, content: str, key: str
) -> None:
    answer = await front.send(path, f'{{"model": "lab/moon", {content}}}')
    message = error_of(answer, 400)["message"]
    assert "twice in one object" in message and key in message
    assert len(message) < 300


async def test_texts_that_look_like_keys_are_texts(front: Front) -> None:
    for text in ('": "', '{"a": 1, "a": 2}', "\\", ':":', '"\n: ', "\u00e9\U0001f317" + 30 * '":'):
        for prompt in (text, text * 900):
            answer = await front.post(COMPLETIONS, prompt=prompt, user=text, max_tokens=1)
            assert "twice" not in answer.text


async def test_another_model_is_not_found(front: Front) -> None:
    for path in (COMPLETIONS, CHAT):
        error = await front.error(path, 404, model="lab/sun")
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "lab/sun" in error["message"] and "lab/moon" in error["message"]
    error = error_of(await front.get("/v1/models/lab/sun"), 404)
    assert error["code"] == "model_not_found"


async def test_routes_and_methods_that_do_not_exist_are_named(front: Front) -> None:
    assert "/v1/nothing" in error_of(await front.get("/v1/nothing"), 404)["message"]
    answer = await front.get(COMPLETIONS)
    assert "GET" in error_of(answer, 405)["message"]
    assert answer.headers["allow"] == "POST"
    # Its methods have a route each.
    answer = await front.client.patch("/v1/responses/1")
    assert answer.headers["allow"] == "DELETE, GET, HEAD"
    error_of(await front.get("/v1/models/"), 404)


async def test_a_route_of_openais_that_is_not_here_is_answered_with_those_that_are(
    front: Front,
) -> None:
    answer = await front.send("/v1/embeddings", '{"model": "lab/moon", "input": "Hello"}')
    message = error_of(answer, 404)["message"]
    paths = CHAT, COMPLETIONS, MESSAGES, "/v1/models", "/openapi.json", "/v1/embeddings"
    assert all(path in message for path in paths)
    assert "/debug" not in message and "/metrics" not in message
    assert "/v1/models" not in error_of(await front.get("/nothing"), 404)["message"]


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_limit_is_refused(
    gateway: ScriptedGateway, tokenizer: HubTokenizer, announced: bool
) -> None:
    body = json.dumps({"model": "lab/moon", "prompt": "x" * 600}).encode()

    async def in_pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    limits = RestLimits(bodies=BodyLimits(max_bytes=500))
    async with open_front(gateway, tokenizer, limits=limits) as front:
        content = body if announced else in_pieces()
        answer = await front.client.post(COMPLETIONS, content=content, headers=JSON)
        assert "500 bytes" in error_of(answer, 413)["message"]
        assert answer.headers["connection"] == "close"
        assert answer.headers["x-request-id"]
        assert not gateway.requests
        await front.ask(COMPLETIONS)


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (COMPLETIONS, {"prompt": [70] * 150, "max_tokens": 51}, "prompt"),
        (COMPLETIONS, {"prompt": [70] * 200}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b" * 300]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [[1], [2], [3] * 300]}, "prompt[2]"),
        (CHAT, {"max_completion_tokens": 200}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "半" * 300}]}, "messages"),
    ],
)
async def test_more_than_the_context_holds_is_refused_with_the_numbers(
    front: Front, path: str, change: dict[str, Any], param: str
) -> None:
    error = await front.refused(path, change)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "context is 200 tokens" in error["message"]


async def test_a_model_without_a_chat_template_sends_clients_to_completions(
    gateway: ScriptedGateway, model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    async with open_front(gateway, HubTokenizer(tmp_path)) as front:
        message = (await front.refused(CHAT))["message"]
    assert "no chat template" in message and COMPLETIONS in message


async def test_what_the_chat_template_refuses_or_cannot_write_is_told(
    front: Front, card: ModelCard
) -> None:
    error = await front.refused(CHAT, messages=[*HELLO, {"role": "system", "content": "late"}])
    assert "a system message must be the first one" in error["message"]
    assert error["param"] == "messages"
    tokenizer = FakeTokenizer()
    tokenizer.chat_templates = {"default": "{{ mood }}"}
    async with open_front(ScriptedGateway(model=card), tokenizer) as moody:
        error = await moody.refused(CHAT, chat_template_kwargs={"mood": "\ud800"})
    assert "not Unicode text" in error["message"]


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
    front: Front, stream: bool, refusal: Exception, status: int, retry_after: str | None
) -> None:
    front.gateway.refusal = refusal
    answer = await front.post(COMPLETIONS, stream=stream)
    assert error_of(answer, status)["message"] == str(refusal)
    assert answer.headers.get("retry-after") == retry_after


async def test_an_answer_that_fails_is_an_error_or_ends_its_stream_with_one(front: Front) -> None:
    front.gateway.failure = GenerationFailed("decode-0 died and none is left")
    error = await front.error(COMPLETIONS, 500)
    assert error["message"] == "decode-0 died and none is left"
    for path in (COMPLETIONS, CHAT):
        *chunks, last = await front.stream(path)
        assert chunks
        assert last["error"]["message"] == "decode-0 died and none is left"
        assert last["error"]["code"] == "generation_failed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_mistake_of_ours_tells_nothing_of_our_inside(front: Front, stream: bool) -> None:
    front.gateway.refusal = RuntimeError(SECRET)
    answer = await front.post(COMPLETIONS, stream=stream)
    assert SECRET not in json.dumps(error_of(answer, 500))
    assert answer.headers["x-request-id"]
    front.gateway.refusal, front.gateway.failure = None, RuntimeError(SECRET)
    if stream:
        error = (await front.stream(COMPLETIONS))[-1]["error"]
    else:
        error = await front.error(COMPLETIONS, 500)
    assert SECRET not in json.dumps(error)
    assert error["type"] == "server_error"


async def test_a_generation_that_just_stops_is_a_failure_and_not_an_answer(front: Front) -> None:
    front.gateway.falls_silent = True
    *_, last = await front.stream(COMPLETIONS)
    assert "without saying why" in last["error"]["message"]


async def test_endings_are_counted_by_their_reason(front: Front) -> None:
    front.gateway.refusal = ServerOverloaded("full", retry_after_s=1)
    await front.post(COMPLETIONS)
    front.gateway.refusal, front.gateway.failure = None, GenerationFailed("gone")
    await front.post(COMPLETIONS)
    lines = await front.metrics()
    assert 'halfmoon_request_success_total{finished_reason="error"} 1.0' in lines
    ends = [line for line in lines if line.startswith("halfmoon_request_success_total")]
    assert not any("refused" in line for line in ends)
    assert 'halfmoon_http_requests_total{route="/v1/completions",status="429"} 1.0' in lines
