"""Tools are shown to the model, and what it writes is read back as calls: of chats, of Anthropic's
messages and of OpenAI's responses."""

import json
from typing import Any

import pytest

from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_conductor.tools.tool_call_bodies import ParsedCall
from halfmoon_conductor.tools.tool_call_parser import ToolCallParser
from halfmoon_conductor.tools.tool_call_syntax import tool_call_format_of
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.conductor.fronts import CHAT, HELLO, MESSAGES, RESPONSES, Front, open_front
from tests.conductor.tool_requests import DAY, a_call, function, with_tools

pytestmark = pytest.mark.usefixtures("room")
MOON, TIDE = function("moon_phase", DAY, False), function("tide")
ASKED = {path: with_tools(path, MOON, TIDE) for path in (CHAT, MESSAGES, RESPONSES)}
ASKED[MESSAGES]["tools"][1]["type"] = "custom"
TOOLS = ASKED[CHAT]
CALL, TIDE_CALL = a_call("moon_phase", '{"day": 3}'), a_call("tide", "{}")
SEE = f"See: {CALL}\n{TIDE_CALL}"


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_calls_are_read_out_of_an_answer(front: Front) -> None:
    front.says(f"Let me see.\n{CALL}\n{CALL.replace('3', '4')}")
    choice = await front.choice(CHAT, TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me see."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "moon_phase", "arguments": '{"day": 3}'},
        {"name": "moon_phase", "arguments": '{"day": 4}'},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


async def test_a_stream_says_words_and_then_whole_calls(front: Front) -> None:
    front.says(f"See:{CALL}{CALL}")
    choices = await front.choices(CHAT, TOOLS, stream=True)
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("content") or "" for delta in deltas) == "See:"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert [call["function"]["arguments"] for call in calls] == ['{"day": 3}'] * 2
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_a_message_has_words_and_calls_as_blocks_whole_and_streamed(front: Front) -> None:
    front.says(SEE)
    answer = await front.ask(MESSAGES, ASKED[MESSAGES])
    text, first, second = answer["content"]
    assert text == {"type": "text", "text": "See: "}
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "moon_phase", {"day": 3})
    assert (second["name"], second["input"]) == ("tide", {})
    assert first["id"] != second["id"]
    assert answer["stop_reason"] == "tool_use"

    start, ping, *events, end, stop = await front.stream(MESSAGES, ASKED[MESSAGES])
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
    answer = await front.ask(RESPONSES, ASKED[RESPONSES])
    message, first, second = answer["output"]
    assert message["content"][0]["text"] == "See: "
    assert (first["type"], first["status"]) == ("function_call", "completed")
    assert (first["name"], first["arguments"]) == ("moon_phase", '{"day": 3}')
    assert (second["name"], second["arguments"]) == ("tide", "{}")
    assert len({message["id"], first["id"], second["id"], first["call_id"]}) == 4
    assert [tool["name"] for tool in answer["tools"]] == ["moon_phase", "tide"]
    assert (answer["tool_choice"], answer["parallel_tool_calls"]) == ("auto", True)

    created, _, *events, completed = await front.stream(RESPONSES, ASKED[RESPONSES])
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


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("text", ["Good night.", "<tool_call>not JSON</tool_call> <tool", ""])
async def test_without_a_call_an_answer_is_as_ever(front: Front, path: str, text: str) -> None:
    front.says(text)
    answer = await front.ask(path, ASKED[path])
    events = await front.stream(path, ASKED[path])
    if path == CHAT:
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)
        assert "tool_calls" not in choice["message"]
        told = "".join(each["choices"][0]["delta"].get("content", "") for each in events[:-1])
    elif path == MESSAGES:
        assert answer["content"] == [{"type": "text", "text": text}]
        assert answer["stop_reason"] == "end_turn"
        told = "".join(event["delta"].get("text", "") for event in events if "delta" in event)
    else:
        (message,) = answer["output"]
        assert message["content"][0]["text"] == text
        told = events[-1]["response"]["output"][0]["content"][0]["text"]
    assert told == text


NAMED = {"type": "function", "function": {"name": "tide"}}
ONE = {"type": "any", "disable_parallel_tool_use": True}
ALLOWED = {
    "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "tide"}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "choice", "more", "taken", "refused"),
    [
        (CHAT, "required", {}, f"{CALL}\n{CALL}", "Hello"),
        (CHAT, "required", {}, CALL, CALL.replace("3", '"x"')),
        (CHAT, "required", {"parallel_tool_calls": False}, CALL, f"{CALL}\n{CALL}"),
        (CHAT, NAMED, {}, TIDE_CALL, CALL),
        (CHAT, allowed("required", "moon_phase"), {}, f"{CALL}\n{CALL}", "Hello"),
        (CHAT, allowed("required", "tide"), {}, TIDE_CALL, CALL),
        (CHAT, allowed("auto", "tide"), {}, f"Hello {TIDE_CALL}", CALL),
        (CHAT, allowed("auto", "tide"), {}, "Hello", f"Hello {CALL}"),
        (MESSAGES, {"type": "any"}, {}, f"{CALL}\n{CALL}", "Hello"),
        (MESSAGES, ONE, {}, CALL, f"{CALL}\n{CALL}"),
        (MESSAGES, {"type": "tool", "name": "tide"}, {}, TIDE_CALL, CALL),
        (RESPONSES, "required", {}, f"{CALL}\n{TIDE_CALL}", "Hello"),
        (RESPONSES, {"type": "function", "name": "tide"}, {}, TIDE_CALL, CALL),
        (RESPONSES, ALLOWED, {}, TIDE_CALL, CALL),
    ],
)
async def test_a_choice_constrains_the_answer(
    front: Front, path: str, choice: Any, more: dict[str, Any], taken: str, refused: str
) -> None:
    answer = await front.ask(path, ASKED[path], tool_choice=choice, **more)
    assert front.fits(taken)
    assert not front.fits(refused)
    assert path != RESPONSES or answer["tool_choice"] == choice


async def test_with_none_the_model_does_not_hear_of_tools(front: Front) -> None:
    front.says(CALL)
    message = await front.ask(MESSAGES, ASKED[MESSAGES], tool_choice={"type": "none"})
    assert message["content"] == [{"type": "text", "text": CALL}]
    assert "moon_phase" not in front.prompt()
    response = await front.ask(RESPONSES, ASKED[RESPONSES], tool_choice="none")
    assert response["output"][0]["content"][0]["text"] == CALL
    assert "moon_phase" not in front.prompt()


async def test_a_model_is_told_of_all_tools_whichever_are_allowed(front: Front) -> None:
    choices = ("auto", allowed("auto", "tide", "moon_phase"), allowed("required", "moon_phase"))
    for choice in choices:
        await front.ask(CHAT, TOOLS, tool_choice=choice)
    assert len({request.prompt_token_ids for request in front.gateway.requests}) == 1
    grammars = [bool(request.sampling.grammar) for request in front.gateway.requests]
    assert grammars == [False, False, True], "where all are allowed nothing constrains the answer"


async def test_the_template_sees_tools_calls_and_results(front: Front) -> None:
    called = {"name": "tide", "arguments": '{"at": "Cork"}'}
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": called}]},
        {"role": "tool", "tool_call_id": "c", "content": "high"},
    ]
    await front.ask(CHAT, TOOLS, messages=messages, max_tokens=1)
    for part in ('"arguments": {"at": "Cork"}', "tool:high", '"name": "moon_phase"'):
        assert part in front.prompt()


async def test_a_form_of_calls_that_is_not_known_is_told_of_tools_and_answers_with_text(
    gateway: ScriptedGateway,
) -> None:
    tokenizer = FakeTokenizer()
    tokenizer.chat_templates = {"default": "[TOOLS]{{ tools | tojson }}[CALLS]"}
    gateway.script = [5, 6]
    async with open_front(gateway, tokenizer) as front:
        for choice in (None, "auto"):
            asked = {"tools": TOOLS["tools"], "max_tokens": 2, "tool_choice": choice}
            message = (await front.choice(CHAT, asked))["message"]
            assert message["content"] == " t5 t6" and "tool_calls" not in message
            assert '"moon_phase"' in bytes(front.last.prompt_token_ids).decode()
        for wish in (
            {"tool_choice": "required"},
            {"tool_choice": allowed("auto", "tide")},
            with_tools(CHAT, function("tide", None, True)),
        ):
            refused = await front.refused(CHAT, TOOLS, **wish)
            assert (refused["param"], refused["code"]) == ("tools", "not_supported")
            assert "needs to know how it writes calls" in refused["message"]
        tokenizer.chat_templates = {"default": "{{ messages }}"}
    async with open_front(gateway, tokenizer) as front:
        assert "tells the model of none" in (await front.refused(CHAT, TOOLS))["message"]


def calling(role: str, **block: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}, {"role": "user", "content": "x"}]}


BROKEN = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1"}}
FIRST, SECOND = ASKED[MESSAGES]["tools"]


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"tool_choice": "required", "tools": []}, "without tools"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "sun"}}},
         "sun, which is none"),
        (CHAT, {"tool_choice": allowed("auto", "sun")}, "sun, which is none"),
        (CHAT, {"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [BROKEN]}]},
         "text of a JSON object"),
        (CHAT, {"tool_choice": "required", "guided_regex": "a"}, "send one of them"),
        (CHAT, {"messages": [{"role": "assistant"}]}, "content is required"),
        (MESSAGES, {"tools": None, "tool_choice": {"type": "any"}}, "without tools"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "sun"}}, "none of the tools"),
        (MESSAGES, {"tool_choice": {"type": "some"}}, "auto, any, tool or none"),
        (MESSAGES, {"tools": [FIRST, SECOND, FIRST]}, "the same name"),
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
    front: Front, path: str, fields: dict[str, Any], words: str
) -> None:
    assert words in (await front.refused(path, ASKED[path] | fields))["message"]


def test_llama_s_calls_are_whole_answers() -> None:
    cork = json.dumps({"at": "Cork"})
    for key in ("parameters", "arguments"):
        reader = ToolCallParser("llama3_json", 9)
        assert reader.feed('{"name": "tide", ') == ("", [])
        assert reader.feed(f'"{key}": {{"at": "Cork"}}}}') == ("", [])
        assert reader.finish() == ("", [ParsedCall("tide", cork)])
    talking = ToolCallParser("llama3_json", 9)
    assert talking.feed("Hi {") == ("Hi {", [])
    assert talking.finish() == ("", [])


def test_a_template_without_tools_knows_none() -> None:
    assert tool_call_format_of("{{ messages }}") is None
    assert tool_call_format_of("{% if tools %}<tool_call>{% endif %}") == "hermes"
    llama = """{% if tools %}{"name": …, "parameters": …}{% endif %}"""
    assert tool_call_format_of(llama) == "llama3_json"
