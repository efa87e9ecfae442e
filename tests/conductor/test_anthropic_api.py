"""Anthropic's Messages API."""

import json
from typing import Any

import httpx
import pytest

from halfmoon_conductor.errors import ServerOverloaded
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TEXT = "The moon 🌗 is half 半月 full."
HELLO: dict[str, Any] = {
    "model": "lab/moon",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "Hello"}],
}


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of a whole stream; each event's name is its type."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_message_is_answered_whole_and_cached_tokens_are_counted_apart(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.n_cached = 2
    answer = await post(client, MESSAGES, HELLO)
    assert answer.pop("id").startswith("msg_")
    n_prompt = len(gateway.requests[0].prompt_token_ids)
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "lab/moon",
        "content": [{"type": "text", "text": TEXT}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": n_prompt - 2,
            "output_tokens": len(gateway.script),
            "cache_read_input_tokens": 2,
            "cache_creation_input_tokens": 0,
        },
    }


async def test_the_systems_words_and_blocks_become_one_conversation(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    cached = {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}
    body = {
        **HELLO,
        "system": [cached, {"type": "text", "text": "two"}],
        "messages": [
            {"role": "user", "content": [cached]},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "more"},
        ],
        "top_k": 5,
        "metadata": {"user_id": "me"},
    }
    await post(client, MESSAGES, body)
    (made,) = gateway.requests
    prompt = tokenizer.decode(made.prompt_token_ids)
    assert prompt == "system:one\ntwouser:oneassistant:yesuser:moreassistant:"
    assert (made.sampling.top_k, made.sampling.temperature) == (5, 1.0)
    counted = {name: body[name] for name in ("model", "system", "messages")}
    answer = await post(client, COUNT, counted)
    assert answer == {"input_tokens": len(made.prompt_token_ids)}


@pytest.mark.parametrize(
    ("change", "reason", "sequence"),
    [({"max_tokens": 3}, "max_tokens", None),
     ({"stop_sequences": ["半月", "x"]}, "stop_sequence", "半月"),
     ({}, "end_turn", None)],
)  # fmt: skip
async def test_a_stream_says_what_the_whole_answer_says(
    client: httpx.AsyncClient, change: dict[str, Any], reason: str, sequence: str | None
) -> None:
    whole = await post(client, MESSAGES, {**HELLO, **change})
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    streamed = await client.post(MESSAGES, json={**HELLO, **change, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    start, block, ping, *deltas, block_end, end, stop = events_of(streamed.text)
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert (block["type"], ping["type"]) == ("content_block_start", "ping")
    assert {each["delta"]["type"] for each in deltas} == {"text_delta"}
    assert "".join(each["delta"]["text"] for each in deltas) == whole["content"][0]["text"]
    assert block_end["type"] == "content_block_stop"
    assert end["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert end["usage"] == whole["usage"]
    assert stop == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("change", "status", "kind", "told"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "temperature"),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "input_schema is required"),
        ({"tools": [{"type": "bash_20250124", "name": "bash", "max_characters": 1}]}, 400,
         "invalid_request_error", "; tools of your own are"),
        ({"thinking": {"type": "much"}}, 400, "invalid_request_error", "thinking.type"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, 400,
         "invalid_request_error", "a thinking block can't be in a turn of the user"),
        ({"mood": 1}, 400, "invalid_request_error", "mood is not known"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, 400, "invalid_request_error",
         "last message"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400,
         "invalid_request_error", '"image"'),
        ({"model": "lab/sun"}, 404, "not_found_error", "lab/sun"),
        ({"max_tokens": 300}, 400, "invalid_request_error", "context is 200"),
    ],
)  # fmt: skip
async def test_errors_have_anthropics_shape(
    client: httpx.AsyncClient, change: dict[str, Any], status: int, kind: str, told: str
) -> None:
    answer = await client.post(MESSAGES, json={**HELLO, **change})
    assert answer.status_code == status
    body = answer.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert told in body["error"]["message"]


async def test_so_have_refusals_paths_that_do_not_exist_and_errors_in_mid_stream(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    assert (await client.get(MESSAGES)).json()["type"] == "error"
    assert (await client.post("/v1/messages/none")).json()["error"]["type"] == "not_found_error"
    gateway.refusal = ServerOverloaded("busy", 2.0)
    busy = await client.post(MESSAGES, json={**HELLO, "stream": True})
    assert (busy.status_code, busy.json()["error"]["type"]) == (429, "rate_limit_error")
    assert busy.headers["retry-after"] == "2"
    gateway.refusal, gateway.failure = None, RuntimeError("swordfish")
    *_, last = events_of((await client.post(MESSAGES, json={**HELLO, "stream": True})).text)
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "swordfish" not in last["error"]["message"]
