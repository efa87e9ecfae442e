"""Tools by way of Anthropic's Messages and OpenAI's Responses: the same calls in other shapes."""

import json
from typing import Any

import pytest

from tests.conductor.fronts import COUNT, HELLO, MESSAGES, RESPONSES, Front
from tests.conductor.tool_requests import DAY, a_call, function, with_tools

pytestmark = pytest.mark.usefixtures("room")
FUNCTIONS = ({**function("moon_phase", DAY, False), "description": "Of a day"}, function("tide"))
OPENAI = with_tools(RESPONSES, *FUNCTIONS)
ANTHROPIC = with_tools(MESSAGES, *FUNCTIONS)
ANTHROPIC["tools"][0]["description"] = "Of a day"
ANTHROPIC["tools"][1]["type"] = "custom"
BODIES = {MESSAGES: ANTHROPIC, RESPONSES: OPENAI}
CALL, TIDE = a_call("moon_phase", '{"day": 3}'), a_call("tide", "{}")
SEE = f"See: {CALL}\n{TIDE}"


async def test_a_message_has_words_and_calls_as_blocks_whole_and_streamed(front: Front) -> None:
    front.says(SEE)
    answer = await front.ask(MESSAGES, ANTHROPIC)
    text, first, second = answer["content"]
    assert text == {"type": "text", "text": "See: "}
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "moon_phase", {"day": 3})
    assert (second["name"], second["input"]) == ("tide", {})
    assert first["id"] != second["id"]
    assert answer["stop_reason"] == "tool_use"

    start, ping, *events, end, stop = await front.stream(MESSAGES, ANTHROPIC)
    assert (start["type"], ping["type"], stop["type"]) == ("message_start", "ping", "message_stop")
    assert end["delta"]["stop_reason"] == "tool_use"
    blocks: list[dict[str, Any]] = []
    given, is_open = "", False
    for event in events:
        if event["type"] == "content_block_start":
            assert (is_open, event["index"]) == (False, len(blocks))
            blocks.append(event["content_block"])
            given, is_open = "", True
            continue
        assert (is_open, event["index"]) == (True, len(blocks) - 1)
        if event["type"] == "content_block_stop":
            is_open = False
            if given:
                assert blocks[-1]["input"] == {}
                blocks[-1]["input"] = json.loads(given)
        elif event["delta"]["type"] == "text_delta":
            blocks[-1]["text"] += event["delta"]["text"]
        else:
            assert event["delta"]["type"] == "input_json_delta"
            given += event["delta"]["partial_json"]
    assert not is_open
    for block in (*blocks, *answer["content"]):
        block.pop("id", None)
    assert blocks == answer["content"]


async def test_a_response_has_a_message_and_calls_as_items_whole_and_streamed(
    front: Front,
) -> None:
    front.says(SEE)
    answer = await front.ask(RESPONSES, OPENAI)
    message, first, second = answer["output"]
    assert message["content"][0]["text"] == "See: "
    assert (first["type"], first["status"]) == ("function_call", "completed")
    assert (first["name"], first["arguments"]) == ("moon_phase", '{"day": 3}')
    assert (second["name"], second["arguments"]) == ("tide", "{}")
    assert len({message["id"], first["id"], second["id"], first["call_id"]}) == 4
    assert [tool["name"] for tool in answer["tools"]] == ["moon_phase", "tide"]
    assert (answer["tool_choice"], answer["parallel_tool_calls"]) == ("auto", True)

    created, _, *events, completed = await front.stream(RESPONSES, OPENAI)
    assert created["response"]["output"] == []
    output = completed["response"]["output"]
    kinds = [event["type"].removeprefix("response.") for event in events]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
            "output_item.done"]  # fmt: skip
    n_text = len(events) - 8
    assert kinds[n_text:] == [*call, *call]
    assert (kinds[0], kinds[n_text - 1]) == ("output_item.added", "output_item.done")
    done = [event["item"] for event in events if event["type"].endswith("output_item.done")]
    assert done == output
    for place, item in ((1, output[1]), (2, output[2])):
        added, delta, given, _ = [e for e in events if e["output_index"] == place]
        assert added["item"] == {**item, "arguments": "", "status": "in_progress"}
        assert delta["item_id"] == given["item_id"] == item["id"]
        assert delta["delta"] == given["arguments"] == item["arguments"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("text", ["Good night.", "<tool_call>not JSON</tool_call> <tool", ""])
async def test_without_a_call_an_answer_is_as_ever(front: Front, path: str, text: str) -> None:
    front.says(text)
    answer = await front.ask(path, BODIES[path])
    events = await front.stream(path, BODIES[path])
    if path == MESSAGES:
        assert answer["content"] == [{"type": "text", "text": text}]
        assert answer["stop_reason"] == "end_turn"
        told = "".join(event["delta"].get("text", "") for event in events if "delta" in event)
    else:
        (message,) = answer["output"]
        assert message["content"][0]["text"] == text
        told = events[-1]["response"]["output"][0]["content"][0]["text"]
    assert told == text


ONE = {"type": "any", "disable_parallel_tool_use": True}
ALLOWED = {
    "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "tide"}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "choice", "taken", "refused"),
    [
        (MESSAGES, {"type": "any"}, f"{CALL}\n{CALL}", "Hello"),
        (MESSAGES, ONE, CALL, f"{CALL}\n{CALL}"),
        (MESSAGES, {"type": "tool", "name": "tide"}, TIDE, CALL),
        (RESPONSES, "required", f"{CALL}\n{TIDE}", "Hello"),
        (RESPONSES, {"type": "function", "name": "tide"}, TIDE, CALL),
        (RESPONSES, "required", CALL, CALL.replace("3", '"x"')),
        (RESPONSES, ALLOWED, TIDE, CALL),
    ],
)
async def test_a_choice_constrains_the_answer(
    front: Front, path: str, choice: Any, taken: str, refused: str
) -> None:
    answer = await front.ask(path, BODIES[path], tool_choice=choice)
    assert front.fits(taken)
    assert not front.fits(refused)
    assert path == MESSAGES or answer["tool_choice"] == choice


async def test_with_none_the_model_does_not_hear_of_tools(front: Front) -> None:
    front.says(CALL)
    message = await front.ask(MESSAGES, ANTHROPIC, tool_choice={"type": "none"})
    assert message["content"] == [{"type": "text", "text": CALL}]
    assert "moon_phase" not in front.prompt()
    response = await front.ask(RESPONSES, OPENAI, tool_choice="none")
    assert response["output"][0]["content"][0]["text"] == CALL
    assert "moon_phase" not in front.prompt()


async def test_calls_and_what_they_gave_are_handed_back_in_either_shape(front: Front) -> None:
    front.says(SEE)
    message = await front.ask(MESSAGES, ANTHROPIC)
    response = await front.ask(RESPONSES, OPENAI)
    _, moon, tide = message["content"]
    high = [{"type": "text", "text": "high"}]
    results = [
        {"type": "tool_result", "tool_use_id": moon["id"], "content": "half"},
        {"type": "tool_result", "tool_use_id": tide["id"], "content": high, "is_error": False},
        {"type": "text", "text": "And now?"},
    ]
    turns = [
        *HELLO,
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": results},
    ]
    ids = [call["call_id"] for call in response["output"][1:]]
    items = [
        *HELLO,
        *response["output"],
        {"type": "function_call_output", "call_id": ids[0], "output": "half"},
        {"type": "function_call_output", "call_id": ids[1],
         "output": [{"type": "input_text", "text": "high"}]},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    for path, fields, given in (
        (MESSAGES, {"messages": turns, "max_tokens": 1}, [moon["id"], tide["id"]]),
        (RESPONSES, {"input": items, "max_output_tokens": 1}, ids),
    ):
        await front.ask(path, BODIES[path] | fields)
        assert '"description": "Of a day"' in front.prompt()
        turn, told = front.prompt().split("assistant:See: ")[1].split("tool:half")
        calls = json.loads(turn[: turn.rindex("]") + 1])
        assert [call["id"] for call in calls] == given
        assert [call["function"] for call in calls] == [
            {"name": "moon_phase", "arguments": {"day": 3}},
            {"name": "tide", "arguments": {}},
        ]
        assert told == "tool:highuser:And now?assistant:"
        if path == MESSAGES:
            n_tokens = len(front.last.prompt_token_ids)
            counted = {"messages": turns, "tools": ANTHROPIC["tools"]}
            assert await front.ask(COUNT, counted) == {"input_tokens": n_tokens}


def calling(role: str, **block: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}, {"role": "user", "content": "x"}]}


FIRST = ANTHROPIC["tools"][0]


@pytest.mark.parametrize(
    ("path", "change", "told"),
    [
        (MESSAGES, {"tools": None, "tool_choice": {"type": "any"}}, "without tools"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "sun"}}, "none of the tools"),
        (MESSAGES, {"tool_choice": {"type": "some"}}, "auto, any, tool or none"),
        (MESSAGES, {"tools": [*ANTHROPIC["tools"], FIRST]}, "the same name"),
        (MESSAGES, {"tools": [{**FIRST, "strict": "yes"}]}, "strict"),
        (MESSAGES, calling("user", type="tool_use", id="a", name="tide", input={}),
         "a tool_use block can't be in a turn of the user"),
        (MESSAGES, calling("assistant", type="tool_result", tool_use_id="a"),
         "a tool_result block can't be in a turn of the assistant"),
        (RESPONSES, {"tools": [], "tool_choice": "required"}, "without tools"),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "sun"}}, "none of the tools"),
        (RESPONSES, {"tool_choice": {"type": "web_search"}}, "a function's name is"),
        (RESPONSES, {"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "one of"),
        (RESPONSES,
         {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1"}]},
         "text of a JSON object"),
    ],
)  # fmt: skip
async def test_what_can_not_be_had_is_refused(
    front: Front, path: str, change: dict[str, Any], told: str
) -> None:
    assert told in (await front.refused(path, BODIES[path] | change))["message"]
