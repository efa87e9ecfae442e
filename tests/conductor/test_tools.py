"""Tools are shown to the model, and what it writes is read back as calls."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_conductor.tools.tool_call_bodies import ParsedCall
from halfmoon_conductor.tools.tool_call_parser import ToolCallParser
from halfmoon_conductor.tools.tool_call_syntax import tool_call_format_of
from halfmoon_testing.conductor_http import ScriptedGateway

MOON = {
    "type": "function",
    "function": {
        "name": "moon_phase",
        "parameters": {
            "type": "object",
            "properties": {"day": {"type": "integer"}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}
TIDE = {"type": "function", "function": {"name": "tide"}}
CHAT = {"model": "lab/moon", "messages": [{"role": "user", "content": "Hi"}], "tools": [MOON, TIDE]}
CALL = '<tool_call>\n{"name": "moon_phase", "arguments": {"day": 3}}\n</tool_call>'
TIDE_CALL = '<tool_call>\n{"name": "tide", "arguments": {}}\n</tool_call>'
Events = Callable[[str], list[Any]]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture
def card() -> ModelCard:
    """One with room for tools in its context."""
    return ModelCard(name="lab/moon", max_context=4000, created=1_700_000_000)


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={**CHAT, **fields})


def says(gateway: ScriptedGateway, tokenizer: HubTokenizer, text: str) -> None:
    gateway.script = [*tokenizer.encode(text, add_special_tokens=False), 0]


async def test_calls_are_read_out_of_an_answer(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    says(gateway, tokenizer, f"Let me see.\n{CALL}\n{CALL.replace('3', '4')}")
    (choice,) = (await ask(client)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me see."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "moon_phase", "arguments": '{"day": 3}'},
        {"name": "moon_phase", "arguments": '{"day": 4}'},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


async def test_a_stream_says_words_and_then_whole_calls(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    tokenizer: HubTokenizer,
    events_of: Events,
) -> None:
    says(gateway, tokenizer, f"See:{CALL}{CALL}")
    *chunks, done = events_of((await ask(client, stream=True)).text)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "See:"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert [call["function"]["arguments"] for call in calls] == ['{"day": 3}'] * 2
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_without_a_call_an_answer_is_as_ever(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    says(gateway, tokenizer, "<tool_call>not JSON</tool_call> <tool")
    (choice,) = (await ask(client)).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "<tool_call>not JSON</tool_call> <tool"
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    ("fields", "taken", "refused"),
    [
        ({"tool_choice": "required"}, f"{CALL}\n{CALL}", "Hello"),
        ({"tool_choice": "required"}, CALL, CALL.replace("3", '"x"')),
        ({"tool_choice": "required", "parallel_tool_calls": False}, CALL, f"{CALL}\n{CALL}"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "tide"}}},
            '<tool_call>\n{"name": "tide", "arguments": {}}\n</tool_call>',
            CALL,
        ),
        ({"tool_choice": allowed("required", "moon_phase")}, f"{CALL}\n{CALL}", "Hello"),
        ({"tool_choice": allowed("required", "tide")}, TIDE_CALL, CALL),
        ({"tool_choice": allowed("auto", "tide")}, f"Hello {TIDE_CALL}", CALL),
        ({"tool_choice": allowed("auto", "tide")}, "Hello", f"Hello {CALL}"),
    ],
)
async def test_a_choice_constrains_the_answer(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    accepts: Callable[[str, str], bool],
    fields: dict[str, Any],
    taken: str,
    refused: str,
) -> None:
    answer = await ask(client, **fields)
    assert answer.status_code == 200, answer.text
    (request,) = gateway.requests
    assert accepts(request.sampling.grammar, taken)
    assert not accepts(request.sampling.grammar, refused)


async def test_where_all_tools_are_allowed_nothing_constrains_the_answer(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    answer = await ask(client, tool_choice=allowed("auto", "tide", "moon_phase"))
    assert answer.status_code == 200, answer.text
    assert gateway.requests[0].sampling.grammar == ""


async def test_a_model_is_told_of_all_tools_whichever_are_allowed(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    for choice in ("auto", allowed("auto", "tide"), allowed("required", "moon_phase")):
        assert (await ask(client, tool_choice=choice)).status_code == 200
    assert len({request.prompt_token_ids for request in gateway.requests}) == 1


async def test_a_response_has_its_allowed_tools_in_its_own_form(
    client: httpx.AsyncClient, gateway: ScriptedGateway, accepts: Callable[[str, str], bool]
) -> None:
    both: list[dict[str, Any]] = [MOON, TIDE]
    tools = [{"type": "function", **each["function"]} for each in both]
    named = [{"type": "function", "name": "tide"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": named}
    body = {"model": "lab/moon", "input": "Hi", "tools": tools, "tool_choice": choice}
    answer = await client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tool_choice"] == choice
    (request,) = gateway.requests
    assert accepts(request.sampling.grammar, TIDE_CALL)
    assert not accepts(request.sampling.grammar, CALL)


async def test_the_template_sees_tools_calls_and_results(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    called = {"name": "tide", "arguments": '{"at": "Cork"}'}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": called}]},
        {"role": "tool", "tool_call_id": "c", "content": "high"},
    ]
    answer = await ask(client, messages=messages, max_tokens=1)
    assert answer.status_code == 200, answer.text
    prompt = tokenizer.decode(gateway.requests[-1].prompt_token_ids)
    assert '"arguments": {"at": "Cork"}' in prompt
    assert "tool:high" in prompt
    assert '"name": "moon_phase"' in prompt


async def test_a_form_of_calls_that_is_not_known_is_told_of_tools_and_answers_with_text(
    card: ModelCard,
) -> None:
    tokenizer = FakeTokenizer()
    tokenizer.chat_templates = {"default": "[TOOLS]{{ tools | tojson }}[CALLS]"}
    gateway = ScriptedGateway([5, 6], model=card)
    app = create_app(gateway, tokenizer, registry=CollectorRegistry())
    transport = httpx.ASGITransport(app=app)
    strict = {"type": "function", "function": {"name": "tide", "strict": True}}
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        for choice in ({}, {"tool_choice": "auto"}):
            message = (await ask(client, max_tokens=2, **choice)).json()["choices"][0]["message"]
            assert message["content"] == " t5 t6" and "tool_calls" not in message
            assert '"moon_phase"' in bytes(gateway.requests[-1].prompt_token_ids).decode()
        for wish in (
            {"tool_choice": "required"},
            {"tool_choice": allowed("auto", "tide")},
            {"tools": [strict]},
        ):
            refused = (await ask(client, **wish)).json()["error"]
            assert (refused["param"], refused["code"]) == ("tools", "not_supported")
            assert "needs to know how it writes calls" in refused["message"]
        tokenizer.chat_templates = {"default": "{{ messages }}"}
    app = create_app(gateway, tokenizer, registry=CollectorRegistry())
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        assert "tells the model of none" in (await ask(client)).json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required", "tools": []}, "without tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "sun"}}}, "sun, which is none"),
        ({"tool_choice": allowed("auto", "sun")}, "sun, which is none"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "c",
                                "type": "function",
                                "function": {"name": "f", "arguments": "[1"},
                            }
                        ],
                    }
                ]
            },
            "text of a JSON object",
        ),
        ({"tools": [TIDE, TIDE]}, "same name"),
        ({"tool_choice": "required", "guided_regex": "a"}, "send one of them"),
        ({"messages": [{"role": "assistant"}]}, "content is required"),
    ],
)
async def test_what_can_not_be_had_is_refused(
    client: httpx.AsyncClient, gateway: ScriptedGateway, fields: dict[str, Any], words: str
) -> None:
    answer = await ask(client, **fields)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert not gateway.requests


@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_however_the_text_is_cut_the_same_comes_out(cuts: list[int]) -> None:
    text = f"a <b {CALL} {CALL} <tool_call>x</tool_call> c<tool_"
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    reader, words, calls = ToolCallParser("hermes", 9), "", list[ParsedCall]()
    parts = [text[i:j] for i, j in itertools.pairwise(at)]
    for got, made in [*(reader.feed(part) for part in parts), reader.finish()]:
        words, calls = words + got, calls + made
    assert calls == [ParsedCall("moon_phase", '{"day": 3}')] * 2
    assert "".join(words.split()) == "a<b<tool_call>x</tool_call>c<tool_"


def test_llama_s_calls_are_whole_answers() -> None:
    reader = ToolCallParser("llama3_json", 9)
    assert reader.feed('{"name": "tide", ') == ("", [])
    assert reader.feed('"parameters": {"at": "Cork"}}') == ("", [])
    assert reader.finish() == ("", [ParsedCall("tide", json.dumps({"at": "Cork"}))])
    otherwise = ToolCallParser("llama3_json", 9)
    otherwise.feed('{"name": "tide", "arguments": {"at": "Cork"}}')
    assert otherwise.finish() == ("", [ParsedCall("tide", json.dumps({"at": "Cork"}))])
    talking = ToolCallParser("llama3_json", 9)
    assert talking.feed("Hi {") == ("Hi {", [])
    assert talking.finish() == ("", [])


def test_a_template_without_tools_knows_none() -> None:
    assert tool_call_format_of("{{ messages }}") is None
    assert tool_call_format_of("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert (
        tool_call_format_of("""{% if tools %}{"name": …, "parameters": …}{% endif %}""")
        == "llama3_json"
    )
