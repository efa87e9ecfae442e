"""OpenAI's Responses API, of text and without state."""

import json
from typing import Any

import httpx
import pytest

from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway

RESPONSES = "/v1/responses"
TEXT = "The moon 🌗 is half 半月 full."
HELLO: dict[str, Any] = {"model": "lab/moon", "input": "Hello"}


async def post(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    answer = await client.post(RESPONSES, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_an_input_is_answered_whole(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.n_cached = 2
    answer = await post(client, {**HELLO, "instructions": "Be brief", "temperature": 0.5})
    assert answer["id"].startswith("resp_")
    (item,) = answer["output"]
    assert item["content"] == [
        {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    ]
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    assert (answer["instructions"], answer["temperature"]) == ("Be brief", 0.5)
    n_prompt, n_new = len(gateway.requests[0].prompt_token_ids), len(gateway.script)
    assert answer["usage"] == {
        "input_tokens": n_prompt,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": n_new,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": n_prompt + n_new,
    }


async def test_an_answer_cut_short_says_so(client: httpx.AsyncClient) -> None:
    answer = await post(client, {**HELLO, "max_output_tokens": 2})
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_an_answer_can_be_handed_back_with_the_next_turn(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    first = await post(client, HELLO)
    turns = [
        {"role": "user", "content": "Hello"},
        *first["output"],
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "More"}]},
    ]
    await post(client, {**HELLO, "input": turns, "instructions": "Be brief"})
    prompt = tokenizer.decode(gateway.requests[-1].prompt_token_ids)
    assert prompt == f"system:Be briefuser:Helloassistant:{TEXT}user:Moreassistant:"


@pytest.mark.parametrize("limit", [None, 3])
async def test_a_streams_events_are_numbered_and_say_what_the_whole_answer_says(
    client: httpx.AsyncClient, limit: int | None
) -> None:
    body = {**HELLO, "max_output_tokens": limit}
    whole = await post(client, body)
    answer = await client.post(RESPONSES, json={**body, "stream": True})
    blocks = [block.split("\n") for block in answer.text.split("\n\n")[:-1]]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {each['type']}" for each in events]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == [
        "output_text.done", "content_part.done", "output_item.done",
        "incomplete" if limit else "completed",
    ]  # fmt: skip
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(each["delta"] for each in events[4:-4]) == text == events[-4]["text"]
    last = events[-1]["response"]
    assert last["usage"] == whole["usage"]
    assert events[0]["response"]["id"] == last["id"]
    assert events[-2]["item"] == last["output"][0]


@pytest.mark.parametrize(
    ("change", "param", "told"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": None}, "input", "a string or a list"),
        ({"tools": [{"type": "search", "filters": {}}]}, "tools[0]", "not supported"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, "input[0].type", "only message"),
        ({"input": [{"type": "reasoning", "content": "a"}]}, "input[0].content", "list"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "text": ""}]}]},
         "input[0].content[0].type", "not supported"),
        ({"mood": "a"}, "mood", "not known"),
    ],
)  # fmt: skip
async def test_what_is_not_supported_is_refused_by_name(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    change: dict[str, Any],
    param: str,
    told: str,
) -> None:
    answer = await client.post(RESPONSES, json={**HELLO, **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert told in answer.json()["error"]["message"]
    assert not gateway.requests


async def test_an_error_in_mid_stream_is_the_last_event(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.failure = RuntimeError("swordfish")
    answer = await client.post(RESPONSES, json={**HELLO, "stream": True})
    last = json.loads(answer.text.split("data: ")[-1])
    assert last["type"] == "error"
    assert last["error"]["type"] == "server_error"
    assert "swordfish" not in answer.text


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("text_format", "response_format"),
    [
        (
            {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True},
            {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        ),
        ({"type": "json_object"}, {"type": "json_object"}),
        ({"type": "text"}, {"type": "text"}),
    ],
)
async def test_a_format_is_what_chats_have_under_another_name_and_the_answer_repeats_it(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    text_format: dict[str, Any],
    response_format: dict[str, Any],
) -> None:
    answer = await post(client, {**HELLO, "text": {"format": text_format}})
    assert answer["text"]["format"] == text_format
    chat = {"model": "lab/moon", "messages": [{"role": "user", "content": "Hello"}]}
    body = {**chat, "response_format": response_format}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    as_response, as_chat = (each.sampling.grammar for each in gateway.requests)
    assert as_response == as_chat
    assert bool(as_chat) == (text_format["type"] != "text")


async def test_a_format_that_can_not_be_had_is_refused_under_its_name_here(
    client: httpx.AsyncClient,
) -> None:
    broken = {"type": "json_schema", "name": "s", "schema": {"type": "moon"}}
    answer = await client.post(RESPONSES, json={**HELLO, "text": {"format": broken}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "text")
    assert error["message"].startswith("text does not compile")
