"""Tools by way of Anthropic's Messages and OpenAI's Responses: the same calls in other shapes."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway

MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"day": {"type": "integer"}},
    "required": ["day"],
    "additionalProperties": False,
}
ANTHROPIC: dict[str, Any] = {
    "model": "lab/moon",
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [
        {"name": "moon_phase", "description": "Of a day", "input_schema": SCHEMA},
        {"type": "custom", "name": "tide", "input_schema": {"type": "object"}},
    ],
}
OPENAI: dict[str, Any] = {
    "model": "lab/moon",
    "input": "Hi",
    "tools": [
        {
            "type": "function",
            "name": "moon_phase",
            "description": "Of a day",
            "parameters": SCHEMA,
            "strict": False,
        },
        {"type": "function", "name": "tide"},
    ],
}
CALL = '<tool_call>\n{"name": "moon_phase", "arguments": {"day": 3}}\n</tool_call>'
TIDE = CALL.replace("moon_phase", "tide").replace('{"day": 3}', "{}")
BODIES = [(MESSAGES, ANTHROPIC), (RESPONSES, OPENAI)]


@pytest.fixture
def card() -> ModelCard:
    """One with room for tools in its context."""
    return ModelCard(name="lab/moon", max_context=4000, created=1_700_000_000)


def says(gateway: ScriptedGateway, tokenizer: HubTokenizer, text: str) -> None:
    gateway.script = [*tokenizer.encode(text, add_special_tokens=False), 0]


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any], **more: Any) -> Any:
    answer = await client.post(path, json={**body, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> list[dict[str, Any]]:
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return [json.loads(block.split("data: ")[1]) for block in answer.text.split("\n\n")[:-1]]


async def test_a_message_has_words_and_calls_as_blocks(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    says(gateway, tokenizer, f"See: {CALL}\n{TIDE}")
    answer = await post(client, MESSAGES, ANTHROPIC)
    text, first, second = answer["content"]
    assert text == {"type": "text", "text": "See: "}
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "moon_phase", {"day": 3})
    assert (second["name"], second["input"]) == ("tide", {})
    assert first["id"] != second["id"]
    assert answer["stop_reason"] == "tool_use"


async def test_a_messages_stream_opens_fills_and_closes_each_block(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    says(gateway, tokenizer, f"See: {CALL}\n{TIDE}")
    whole = await post(client, MESSAGES, ANTHROPIC)
    start, ping, *events, end, stop = await streamed(client, MESSAGES, ANTHROPIC)
    assert (start["type"], ping["type"], stop["type"]) == ("message_start", "ping", "message_stop")
    assert end["delta"]["stop_reason"] == "tool_use"
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "given": ""})
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            is_open = False
        elif event["delta"]["type"] == "text_delta":
            blocks[-1]["text"] += event["delta"]["text"]
        else:
            assert event["delta"]["type"] == "input_json_delta"
            assert blocks[-1]["input"] == {}
            blocks[-1]["given"] += event["delta"]["partial_json"]
    assert not is_open
    made = [{**block, "input": json.loads(block["given"])} if block["given"] else block
            for block in blocks]  # fmt: skip
    for block in (*made, *whole["content"]):
        block.pop("given", None), block.pop("id", None)
    assert made == whole["content"]


async def test_a_response_has_a_message_and_calls_as_items(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    says(gateway, tokenizer, f"See: {CALL}\n{TIDE}")
    answer = await post(client, RESPONSES, OPENAI)
    message, first, second = answer["output"]
    assert message["content"][0]["text"] == "See: "
    assert (first["type"], first["status"]) == ("function_call", "completed")
    assert (first["name"], first["arguments"]) == ("moon_phase", '{"day": 3}')
    assert (second["name"], second["arguments"]) == ("tide", "{}")
    assert len({message["id"], first["id"], second["id"], first["call_id"]}) == 4
    assert [tool["name"] for tool in answer["tools"]] == ["moon_phase", "tide"]
    assert (answer["tool_choice"], answer["parallel_tool_calls"]) == ("auto", True)


async def test_a_responses_stream_tells_of_each_item_from_its_beginning_to_its_end(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    says(gateway, tokenizer, f"See: {CALL}\n{TIDE}")
    created, _, *events, completed = await streamed(client, RESPONSES, OPENAI)
    assert created["response"]["output"] == []
    output = completed["response"]["output"]
    kinds = [event["type"].removeprefix("response.") for event in events]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
            "output_item.done"]  # fmt: skip
    n_text = len(events) - 8
    assert kinds[n_text:] == [*call, *call]
    assert kinds[0] == "output_item.added"
    assert kinds[n_text - 1] == "output_item.done"
    done = [event["item"] for event in events if event["type"].endswith("output_item.done")]
    assert done == output
    for place, item in ((1, output[1]), (2, output[2])):
        added, delta, given, _ = [e for e in events if e["output_index"] == place]
        assert added["item"] == {**item, "arguments": "", "status": "in_progress"}
        assert delta["item_id"] == given["item_id"] == item["id"]
        assert delta["delta"] == given["arguments"] == item["arguments"]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("text", ["Good night.", "<tool_call>not JSON</tool_call> <tool", ""])
async def test_without_a_call_an_answer_is_as_ever(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    tokenizer: HubTokenizer,
    path: str,
    body: dict[str, Any],
    text: str,
) -> None:
    says(gateway, tokenizer, text)
    answer = await post(client, path, body)
    events = await streamed(client, path, body)
    if path == MESSAGES:
        assert answer["content"] == [{"type": "text", "text": text}]
        assert answer["stop_reason"] == "end_turn"
        told = "".join(event["delta"].get("text", "") for event in events if "delta" in event)
    else:
        (message,) = answer["output"]
        assert message["content"][0]["text"] == text
        told = events[-1]["response"]["output"][0]["content"][0]["text"]
    assert told == text


@pytest.mark.parametrize(
    ("path", "body", "choice", "taken", "refused"),
    [
        (MESSAGES, ANTHROPIC, {"type": "any"}, f"{CALL}\n{CALL}", "Hello"),
        (MESSAGES, ANTHROPIC, {"type": "any", "disable_parallel_tool_use": True}, CALL,
         f"{CALL}\n{CALL}"),
        (MESSAGES, ANTHROPIC, {"type": "tool", "name": "tide"}, TIDE, CALL),
        (RESPONSES, OPENAI, "required", f"{CALL}\n{TIDE}", "Hello"),
        (RESPONSES, OPENAI, {"type": "function", "name": "tide"}, TIDE, CALL),
        (RESPONSES, OPENAI, "required", CALL, CALL.replace("3", '"x"')),
    ],
)  # fmt: skip
async def test_a_choice_constrains_the_answer(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    accepts: Callable[[str, str], bool],
    path: str,
    body: dict[str, Any],
    choice: Any,
    taken: str,
    refused: str,
) -> None:
    await post(client, path, body, tool_choice=choice)
    (request,) = gateway.requests
    assert accepts(request.sampling.grammar, taken)
    assert not accepts(request.sampling.grammar, refused)


async def test_with_none_the_model_does_not_hear_of_tools(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    says(gateway, tokenizer, CALL)
    message = await post(client, MESSAGES, ANTHROPIC, tool_choice={"type": "none"})
    response = await post(client, RESPONSES, OPENAI, tool_choice="none")
    assert message["content"] == [{"type": "text", "text": CALL}]
    assert response["output"][0]["content"][0]["text"] == CALL
    for made in gateway.requests:
        assert "moon_phase" not in tokenizer.decode(made.prompt_token_ids)


async def test_calls_and_what_they_gave_are_handed_back_in_either_shape(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    says(gateway, tokenizer, f"See: {CALL}\n{TIDE}")
    message = await post(client, MESSAGES, ANTHROPIC)
    response = await post(client, RESPONSES, OPENAI)
    gateway.requests.clear()
    _, moon, tide = message["content"]
    turns = [
        *ANTHROPIC["messages"],
        {"role": "assistant", "content": message["content"]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": moon["id"], "content": "half"},
                {
                    "type": "tool_result",
                    "tool_use_id": tide["id"],
                    "content": [{"type": "text", "text": "high"}],
                    "is_error": False,
                },
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    said = {**ANTHROPIC, "messages": turns}
    await post(client, MESSAGES, said, max_tokens=1)
    items = [
        {"role": "user", "content": "Hi"},
        *response["output"],
        {"type": "function_call_output", "call_id": response["output"][1]["call_id"],
         "output": "half"},
        {"type": "function_call_output", "call_id": response["output"][2]["call_id"],
         "output": [{"type": "input_text", "text": "high"}]},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    await post(client, RESPONSES, OPENAI, input=items, max_output_tokens=1)
    told = [tokenizer.decode(made.prompt_token_ids) for made in gateway.requests]
    given = [[moon["id"], tide["id"]], [item["call_id"] for item in response["output"][1:]]]
    for prompt, ids in zip(told, given, strict=True):
        assert '"description": "Of a day"' in prompt
        turn, results = prompt.split("assistant:See: ")[1].split("tool:half")
        calls = json.loads(turn[: turn.rindex("]") + 1])
        assert [call["id"] for call in calls] == ids
        assert [call["function"] for call in calls] == [
            {"name": "moon_phase", "arguments": {"day": 3}},
            {"name": "tide", "arguments": {}},
        ]
        assert results == "tool:highuser:And now?assistant:"
    counted = {name: said[name] for name in ("model", "messages", "tools")}
    answer = await post(client, COUNT, counted)
    assert answer == {"input_tokens": len(gateway.requests[0].prompt_token_ids)}


def calling(role: str, block: dict[str, Any]) -> dict[str, Any]:
    turns = [{"role": role, "content": [block]}, {"role": "user", "content": "x"}]
    return {"messages": turns}


@pytest.mark.parametrize(
    ("path", "change", "told"),
    [
        (MESSAGES, {"tools": None, "tool_choice": {"type": "any"}}, "without tools"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "sun"}}, "none of the tools"),
        (MESSAGES, {"tool_choice": {"type": "some"}}, "auto, any, tool or none"),
        (MESSAGES, {"tools": [*ANTHROPIC["tools"], ANTHROPIC["tools"][0]]}, "the same name"),
        (MESSAGES, {"tools": [{**ANTHROPIC["tools"][0], "strict": "yes"}]}, "strict"),
        (
            MESSAGES,
            calling("user", {"type": "tool_use", "id": "a", "name": "tide", "input": {}}),
            "a tool_use block can't be in a turn of the user",
        ),
        (
            MESSAGES,
            calling("assistant", {"type": "tool_result", "tool_use_id": "a"}),
            "a tool_result block can't be in a turn of the assistant",
        ),
        (RESPONSES, {"tools": [], "tool_choice": "required"}, "without tools"),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "sun"}}, "none of the tools"),
        (RESPONSES, {"tool_choice": {"type": "web_search"}}, "a function's name is"),
        (RESPONSES, {"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "one of"),
        (
            RESPONSES,
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1"}]},
            "text of a JSON object",
        ),
    ],
)
async def test_what_can_not_be_had_is_refused(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    path: str,
    change: dict[str, Any],
    told: str,
) -> None:
    answer = await client.post(path, json={**dict(BODIES)[path], **change})
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]
    assert not gateway.requests
