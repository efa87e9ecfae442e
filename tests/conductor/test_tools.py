"""Tools are shown to the model, and what it writes is read back as calls."""

import json
from typing import Any

import pytest

from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_conductor.tools.tool_call_bodies import ParsedCall
from halfmoon_conductor.tools.tool_call_parser import ToolCallParser
from halfmoon_conductor.tools.tool_call_syntax import tool_call_format_of
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.conductor.fronts import CHAT, HELLO, Front, open_front
from tests.conductor.tool_requests import DAY, a_call, function, with_tools

pytestmark = pytest.mark.usefixtures("room")
MOON, TIDE = function("moon_phase", DAY), function("tide")
TOOLS = with_tools(CHAT, MOON, TIDE)
CALL, TIDE_CALL = a_call("moon_phase", '{"day": 3}'), a_call("tide", "{}")


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


async def test_without_a_call_an_answer_is_as_ever(front: Front) -> None:
    front.says("<tool_call>not JSON</tool_call> <tool")
    choice = await front.choice(CHAT, TOOLS)
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "<tool_call>not JSON</tool_call> <tool"
    assert "tool_calls" not in choice["message"]


NAMED = {"type": "function", "function": {"name": "tide"}}


@pytest.mark.parametrize(
    ("choice", "more", "taken", "refused"),
    [
        ("required", {}, f"{CALL}\n{CALL}", "Hello"),
        ("required", {}, CALL, CALL.replace("3", '"x"')),
        ("required", {"parallel_tool_calls": False}, CALL, f"{CALL}\n{CALL}"),
        (NAMED, {}, TIDE_CALL, CALL),
        (allowed("required", "moon_phase"), {}, f"{CALL}\n{CALL}", "Hello"),
        (allowed("required", "tide"), {}, TIDE_CALL, CALL),
        (allowed("auto", "tide"), {}, f"Hello {TIDE_CALL}", CALL),
        (allowed("auto", "tide"), {}, "Hello", f"Hello {CALL}"),
    ],
)
async def test_a_choice_constrains_the_answer(
    front: Front, choice: Any, more: dict[str, Any], taken: str, refused: str
) -> None:
    await front.ask(CHAT, TOOLS, tool_choice=choice, **more)
    assert front.fits(taken)
    assert not front.fits(refused)


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


BROKEN = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required", "tools": []}, "without tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "sun"}}}, "sun, which is none"),
        ({"tool_choice": allowed("auto", "sun")}, "sun, which is none"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [BROKEN]}]}, "text of a JSON object"),
        ({"tool_choice": "required", "guided_regex": "a"}, "send one of them"),
        ({"messages": [{"role": "assistant"}]}, "content is required"),
    ],
)
async def test_what_can_not_be_had_is_refused(
    front: Front, fields: dict[str, Any], words: str
) -> None:
    assert words in (await front.refused(CHAT, TOOLS, **fields))["message"]


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
