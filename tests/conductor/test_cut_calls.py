"""A call that is cut off, anywhere, comes as a call as far as it goes, and never as words."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pydantic_core
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from halfmoon_conductor.engine_io.tool_call_rules import ToolCallFormat
from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_conductor.tools.tool_call_parser import ToolCallParser
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.conductor.fronts import CHAT, HELLO, RESPONSES, Front
from tests.conductor.tool_requests import TOOL_PATHS, function, with_tools
from tests.nightly import by_day

pytestmark = pytest.mark.usefixtures("room")
SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "string"}, "day": {"type": "integer"}},
    "required": ["at", "day"],
    "additionalProperties": False,
}
ARGUMENTS = '{"at": "Cork </tool_call> a", "day": 3}'
NAMES = ("moon_phase", "moon_rise")


class Answer(NamedTuple):
    """What a client reads, of either API."""

    words: str
    #: Names and arguments.
    calls: list[tuple[str, Any]]
    end: str


def written(parser: ToolCallFormat) -> tuple[str, int, int]:
    """A call as models write it, and where its name and its arguments begin."""
    key, opened, closed = (
        ("arguments", "<tool_call>\n", "\n</tool_call>")
        if parser == "hermes"
        else ("parameters", "", "")
    )
    begin = f'{opened}{{"name": "'
    head = f'{begin}{NAMES[0]}", "{key}": '
    return f"{head}{ARGUMENTS}}}{closed}", len(begin), len(head)


def expected(parser: ToolCallFormat, cut: int, names: tuple[str, ...]) -> list[tuple[str, str]]:
    """What has to come of a call's first characters, when nothing but a call may come."""
    text, name_at, arguments_at = written(parser)
    if cut < arguments_at:
        came = text[name_at:cut].partition('"')[0] if cut > name_at else ""
        closed = cut > name_at + len(NAMES[0])
        fit = [name for name in names if (name == came if closed else name.startswith(came))]
        return [(fit[0], "")] if len(fit) == 1 else []
    return [(NAMES[0], text[arguments_at : min(cut, arguments_at + len(ARGUMENTS))])]


@pytest.fixture(params=["hermes", "llama3_json"])
def parser(request: pytest.FixtureRequest) -> ToolCallFormat:
    return request.param  # type: ignore[no-any-return]


HERMES = pytest.mark.parametrize("parser", ["hermes"], indirect=True)


@pytest.fixture
def app(
    gateway: ScriptedGateway,
    tokenizer: HubTokenizer,
    registry: CollectorRegistry,
    parser: ToolCallFormat,
) -> FastAPI:
    return create_app(gateway, tokenizer, registry=registry, tool_call_parser=parser)


def asked(api: str, names: tuple[str, ...], choice: str, limit: int, **more: Any) -> Any:
    strict = (function(name, SCHEMA, True) for name in names)
    return with_tools(TOOL_PATHS[api], *strict, choice=choice, limit=limit, **more)


def limits(api: str, n_tokens: int) -> list[int]:
    """All lengths at night; by day each third, others for each API, and the whole."""
    step = by_day(3, at_night=1)
    return [*range(1 + list(TOOL_PATHS).index(api) % step, n_tokens, step), n_tokens]


def read_chat(answer: Any) -> Answer:
    (choice,) = answer["choices"]
    made = [call["function"] for call in choice["message"].get("tool_calls", ())]
    calls = [(call["name"], call["arguments"]) for call in made]
    return Answer((choice["message"]["content"] or "").strip(), calls, choice["finish_reason"])


def read_chunks(chunks: list[Any]) -> Answer:
    assert chunks.pop() == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    words = "".join(delta.get("content") or "" for delta in deltas)
    made = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in made] == list(range(len(made)))
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in made]
    return Answer(words.strip(), calls, chunks[-1]["choices"][0]["finish_reason"])


def read_response(answer: Any) -> Answer:
    words, calls = "", list[tuple[str, Any]]()
    for item in answer["output"]:
        if item["type"] == "message":
            words += item["content"][0]["text"]
        else:
            calls.append((item["name"], item["arguments"]))
            assert item["status"] == ("completed" if is_json(item["arguments"]) else "incomplete")
    if answer["status"] == "incomplete":
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    return Answer(words.strip(), calls, answer["status"])


def read_response_events(told: list[Any]) -> Answer:
    answer = read_response(told[-1]["response"])
    given = [each["delta"] for each in told if each["type"].endswith("arguments.delta")]
    assert given == [arguments for _, arguments in answer.calls]
    assert told[-1]["type"] == f"response.{answer.end}"
    return answer


def read_message(answer: Any) -> Answer:
    words = "".join(block.get("text", "") for block in answer["content"])
    uses = [block for block in answer["content"] if block["type"] != "text"]
    calls = [(block["name"], block["input"]) for block in uses]
    return Answer(words.strip(), calls, answer["stop_reason"])


def read_message_events(told: list[Any]) -> Answer:
    words, calls = "", list[tuple[str, Any]]()
    for event in told:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls.append((event["content_block"]["name"], ""))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            words += delta.get("text", "")
            if "partial_json" in delta:
                name, given = calls[-1]
                calls[-1] = name, given + delta["partial_json"]
    # As Anthropic's package puts them together.
    read = [(name, members(given)) for name, given in calls]
    return Answer(words.strip(), read, told[-2]["delta"]["stop_reason"])


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def members(arguments: str) -> Any:
    return pydantic_core.from_json(arguments or "{}", allow_partial=True)


READERS: dict[str, tuple[Callable[[Any], Answer], Callable[[Any], Answer]]] = {
    "chat": (read_chat, read_chunks),
    "responses": (read_response, read_response_events),
    "messages": (read_message, read_message_events),
}
CUT = {"chat": "length", "responses": "incomplete", "messages": "max_tokens"}
WHOLE = {"chat": "tool_calls", "responses": "completed", "messages": "tool_use"}


async def both(front: Front, api: str, *request: Any, **more: Any) -> Answer:
    """The same answer, whole and streamed."""
    whole, streamed = READERS[api]
    fields = asked(api, *request, **more)
    answer = whole(await front.ask(TOOL_PATHS[api], fields))
    assert streamed(await front.stream(TOOL_PATHS[api], fields)) == answer
    return answer


def tokens_of(front: Front, text: str) -> list[int]:
    """Have the model say a text; return its tokens."""
    front.says(text)
    return list(front.gateway.script[:-1])


@pytest.mark.parametrize("api", TOOL_PATHS)
@pytest.mark.parametrize("names", [NAMES, NAMES[:1]])
async def test_a_required_call_cut_at_any_token_is_a_call_as_far_as_it_goes(
    front: Front, parser: ToolCallFormat, api: str, names: tuple[str, ...]
) -> None:
    tokens = tokens_of(front, written(parser)[0])
    for limit in limits(api, len(tokens)):
        came = len(front.tokenizer.decode(tokens[:limit]))
        calls: list[tuple[str, Any]] = list(expected(parser, came, names))
        if api == "messages":
            calls = [(name, members(arguments)) for name, arguments in calls]
        answer = await both(front, api, names, "required", limit)
        assert answer == Answer("", calls, CUT[api]), came
    answer = await both(front, api, names, "required", len(tokens) + 1)
    assert (answer.end, len(answer.calls)) == (WHOLE[api], 1)


@pytest.mark.parametrize("api", TOOL_PATHS)
async def test_a_stop_string_within_a_call_cuts_it_off_like_a_limit_and_is_named_beside_it(
    front: Front, parser: ToolCallFormat, api: str
) -> None:
    text, _, arguments_at = written(parser)
    front.says(text)
    ends = {"chat": "length", "responses": "incomplete", "messages": "stop_sequence"}
    for stop, n_calls in (("Cork", 1), ('"day', 1), ("phase", 1), ("moon", 0), ("{", 0)):
        names = NAMES if n_calls == 0 else NAMES[:1]
        answer = await both(front, api, names, "required", 400, stop=[stop])
        assert (answer.words, answer.end, len(answer.calls)) == ("", ends[api], n_calls)
        if answer.calls and api != "messages":
            assert answer.calls == [(NAMES[0], text[arguments_at : text.index(stop)])]
    choice = await front.choice(CHAT, asked("chat", NAMES, "required", 400, stop=["Cork"]))
    assert choice["stop_reason"] == "Cork"


@pytest.mark.parametrize(
    ("text", "words", "calls"),
    [
        ("a <tool_call> b", "a <tool_call> b", []),
        ("a < b <tool", "a < b <tool", []),
        ('a <tool_call>{"name": "moon', "a ", []),
        ('a <tool_call>{ "name":"moon_p', "a ", [("moon_phase", "")]),
        ('<tool_call>{"name": "sun"', '<tool_call>{"name": "sun"', []),
        ('<tool_call>{"name": "sun", "arguments": {"a', "", [("sun", '{"a')]),
        ('<tool_call>{"name": "sun", "parameters": {} ', "", [("sun", "{}")]),
        ('<tool_call>{"name": "sun", "parameters": 3', None, []),
    ],
)
def test_where_calls_are_free_what_can_be_none_stays_words_when_it_is_cut_off(
    text: str, words: str | None, calls: list[tuple[str, str]]
) -> None:
    reader = ToolCallParser("hermes", 9, NAMES)
    said, made = reader.feed(text)
    rest, last = reader.finish(cut=True)
    assert said + rest == (text if words is None else words)
    assert [(call.name, call.arguments) for call in made + last] == calls


@pytest.mark.parametrize(
    ("text", "n_calls", "stays"),
    [
        ('{"name": "moon_rise", "parameters": {"day', 1, False),
        ('{"name": "moon_r', 1, False),
        ('{"name": "moon', 0, False),
        ('{"name": "Ann", "age": 3', 0, True),
        ('{"name": "Ann", "parameters": {"a', 0, True),
        ('{"na', 0, True),
        ("{", 0, True),
    ],
)
def test_json_that_is_cut_off_is_a_call_of_llama_only_with_the_name_of_a_function(
    text: str, n_calls: int, stays: bool
) -> None:
    reader = ToolCallParser("llama3_json", 9, NAMES)
    assert reader.feed(text) == ("", [])
    words, calls = reader.finish(cut=True)
    assert (words, len(calls)) == (text if stays else "", n_calls)


def handed_back(arguments: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests with a call of these arguments and what it gave."""
    made = {"name": NAMES[0], "arguments": arguments}
    turn = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": made}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "What?"}
    call = {"type": "function_call", "call_id": "c", **made, "status": "incomplete"}
    output = {"type": "function_call_output", "call_id": "c", "output": "What?"}
    return [
        (CHAT, asked("chat", NAMES, "auto", 4, messages=[*HELLO, turn, result])),
        (RESPONSES, asked("responses", NAMES, "auto", 4, input=[*HELLO, call, output])),
    ]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"at": "Cork", "day": ', {"at": "Cork"}),
        ('{"at": "Co', {}),
        ("{", {}),
        ("", {}),
        ('{"a": nonsense', {}),
        ('{"a": 1', {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": ' + "[" * 3000, {}),
    ],
)
@HERMES
async def test_a_call_that_was_cut_off_may_be_handed_back_as_it_came(
    front: Front, arguments: str, read: Any
) -> None:
    for path, fields in handed_back(arguments):
        await front.ask(path, fields)
        assert f'"arguments": {json.dumps(read)}' in front.prompt()


@pytest.mark.parametrize("api", TOOL_PATHS)
async def test_a_call_that_spells_half_of_a_surrogate_pair_can_be_answered_and_handed_back(
    front: Front, parser: ToolCallFormat, api: str
) -> None:
    front.says(written(parser)[0].replace("Cork </tool_call>", "\\ud800"))
    answer = await both(front, api, NAMES, "required", 400)
    ((_, arguments),) = answer.calls
    read = arguments if api == "messages" else json.loads(arguments)
    assert read == {"at": "\ufffd a", "day": 3}
    for path, fields in handed_back('{"at": "\\ud800"}'):
        await front.ask(path, fields)


async def test_a_stop_token_within_a_call_cuts_it_off_like_a_limit(
    front: Front, parser: ToolCallFormat
) -> None:
    text, _, arguments_at = written(parser)
    tokens, decode = tokens_of(front, text), front.tokenizer.decode
    n_before = next(n for n in range(len(tokens)) if len(decode(tokens[:n])) > arguments_at)
    stop = next(token for token in tokens[n_before:] if token not in tokens[:n_before])
    answer = await both(front, "chat", NAMES, "required", 400, stop_token_ids=[stop])
    arguments = decode(tokens[: tokens.index(stop)])[arguments_at:]
    assert answer == Answer("", [(NAMES[0], arguments)], "length")
