"""A strict function's arguments keep to its schema whenever it is called, whatever the choice."""

import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import llguidance
import numpy as np
import pytest
from tokenizers import Tokenizer

from halfmoon_conductor.api.openai.openai_requests import ChatRequest
from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.engine_io.tool_call_rules import ToolCallFormat, ToolCallRules
from halfmoon_conductor.grammar.grammars import RequestedGrammar
from halfmoon_conductor.inputs.tool_constraints import grammar_of_chat, tool_call_rules_of
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_conductor.tools.tool_call_parser import ToolCallParser
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.nightly import by_day

DAY = {
    "type": "object",
    "properties": {"day": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["day"],
    "additionalProperties": False,
}
#: With the markers themselves as arguments.
TRAP = {
    "type": "object",
    "properties": {"text": {"enum": ["</tool_call>", "<tool_call>", '{"name": "moon"}', "\\"]}},
    "required": ["text"],
    "additionalProperties": False,
}
ANSWER = {
    "type": "object",
    "properties": {"name": {"enum": ["moon", "</tool_call>"]}, "n": {"type": "boolean"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "moon", "arguments": {"day": 3}}\n</tool_call>'
LLAMA = '{"name": "moon", "parameters": {"day": 3}}'
TIDE = '<tool_call>\n{"name": "tide", "arguments": {"any": [1]}}\n</tool_call>'
HELLO = [{"role": "user", "content": "Hi"}]


def function(name: str, schema: dict[str, Any] | None, strict: bool | None) -> dict[str, Any]:
    told = {"name": name, "parameters": schema, "strict": strict}
    return {name: value for name, value in told.items() if value is not None}


def chat(*functions: dict[str, Any], **more: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": each} for each in functions]
    return {"model": "lab/moon", "messages": HELLO, "tools": tools, **more}


def response(*functions: dict[str, Any], **more: Any) -> dict[str, Any]:
    tools = [{"type": "function", **each} for each in functions]
    return {"model": "lab/moon", "input": "Hi", "tools": tools, **more}


def message(*functions: dict[str, Any], **more: Any) -> dict[str, Any]:
    tools = [
        {
            "name": each["name"],
            "input_schema": each.get("parameters", {"type": "object"}),
            "strict": each.get("strict"),
        }
        for each in functions
    ]
    body = {"model": "lab/moon", "messages": HELLO, "max_tokens": 400, "tools": tools}
    return {**body, **more}


ROUTES: list[tuple[str, Callable[..., dict[str, Any]]]] = [
    ("/v1/chat/completions", chat),
    ("/v1/responses", response),
    ("/v1/messages", message),
]
MOON, LOOSE = function("moon", DAY, True), function("tide", None, None)


@pytest.fixture
def card() -> ModelCard:
    """One with room for tools in its context."""
    return ModelCard(name="lab/moon", max_context=4000, created=1_700_000_000)


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("", True),
        ("The moon is <half> full.\n", True),
        (CALL, True),
        (f"Let me see: {CALL}\n{CALL}", True),
        (f"a <tool_{CALL}\n{TIDE}", True),
        (CALL.replace("3", '"x"'), False),
        (CALL.replace('"day": 3', ""), False),
        (CALL.replace("moon", "sun"), False),
        (f"See: {CALL.replace('3', '3.5')}", False),
        (f"{TIDE}\n{CALL.replace('3', '100')}", False),
        ("<tool_call>moon</tool_call>", False),
        ("Call it by <tool_call> some words", False),
    ],
)
async def test_free_text_is_any_and_what_begins_a_call_keeps_to_the_schema(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    accepts: Callable[[str, str], bool],
    path: str,
    body: Callable[..., dict[str, Any]],
    text: str,
    fits: bool,
) -> None:
    answer = await client.post(path, json=body(MOON, LOOSE))
    assert answer.status_code == 200, answer.text
    (request,) = gateway.requests
    assert accepts(request.sampling.grammar, text) == fits


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_without_a_strict_function_nothing_constrains_an_answer(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    path: str,
    body: Callable[..., dict[str, Any]],
) -> None:
    assert (await client.post(path, json=body({**MOON, "strict": False}, LOOSE))).status_code == 200
    assert gateway.requests[0].sampling.grammar == ""


async def test_a_model_does_not_hear_of_strict(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    for strict in (True, False, None):
        await client.post("/v1/chat/completions", json=chat({**MOON, "strict": strict}))
    prompts = {tokenizer.decode(each.prompt_token_ids) for each in gateway.requests}
    assert len(prompts) == 1
    assert "moon" in prompts.pop()


async def test_a_strict_function_without_parameters_takes_none(
    client: httpx.AsyncClient, gateway: ScriptedGateway, accepts: Callable[[str, str], bool]
) -> None:
    bare = function("tide", None, True)
    for choice in ("auto", "required"):
        await client.post("/v1/chat/completions", json=chat(bare, tool_choice=choice))
        grammar = gateway.requests[-1].sampling.grammar
        assert accepts(grammar, TIDE.replace('"any": [1]', ""))
        assert not accepts(grammar, TIDE)


@pytest.mark.parametrize("strict", [True, False])
async def test_an_answer_of_a_form_may_call_instead(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    accepts: Callable[[str, str], bool],
    strict: bool,
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}
    body = chat({**MOON, "strict": strict}, response_format=form)
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    grammar = gateway.requests[0].sampling.grammar
    assert accepts(grammar, '{"name": "moon", "n": true}')
    assert accepts(grammar, f"{CALL}\n{CALL}")
    assert accepts(grammar, CALL.replace("3", '"x"')) != strict
    assert not accepts(grammar, "Hello")
    assert not accepts(grammar, f"Hello {CALL}")


async def test_a_call_that_must_be_made_goes_before_the_form_of_an_answer(
    client: httpx.AsyncClient, gateway: ScriptedGateway, accepts: Callable[[str, str], bool]
) -> None:
    body = chat(MOON, tool_choice="required", response_format={"type": "json_object"})
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    grammar = gateway.requests[0].sampling.grammar
    assert accepts(grammar, CALL)
    assert not accepts(grammar, "{}")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_regex": "a"}, "tools", "a strict function in tools both say"),
        ({"ignore_eos": True}, "ignore_eos", "leave out"),
        ({"ignore_eos": True, "tool_choice": "required"}, "ignore_eos", "leave out"),
    ],
)
async def test_what_contradicts_a_strict_function_is_refused_by_name(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    fields: dict[str, Any],
    param: str,
    words: str,
) -> None:
    answer = await client.post("/v1/chat/completions", json=chat(MOON, **fields))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]
    assert not gateway.requests


async def test_a_schema_that_can_not_be_kept_to_is_refused_before_anything_is_spent(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    answer = await client.post(
        "/v1/chat/completions", json=chat(function("moon", {"not": {}}, True))
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert not gateway.requests


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_arguments_that_could_be_no_object_are_refused(
    client: httpx.AsyncClient, gateway: ScriptedGateway, choice: str
) -> None:
    for schema in ({"type": "string"}, {"type": ["string", "null"]}, {"enum": [1]}):
        body = chat(function("moon", schema, True), tool_choice=choice)
        answer = await client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert not gateway.requests


async def test_arguments_that_need_not_be_objects_are_objects(
    client: httpx.AsyncClient, gateway: ScriptedGateway, accepts: Callable[[str, str], bool]
) -> None:
    for schema in ({}, {"anyOf": [DAY, {"type": "string"}]}, {**DAY, "type": ["object", "null"]}):
        body = chat(function("moon", schema, False), tool_choice="required")
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        grammar = gateway.requests[-1].sampling.grammar
        assert accepts(grammar, CALL)
        assert not accepts(grammar, CALL.replace('{"day": 3}', '"x"'))
        assert not accepts(grammar, CALL.replace('{"day": 3}', "null"))


def sampled(bpe: Tokenizer, grammar: str, begun: str, dice: random.Random) -> tuple[str, bool]:
    """A text of random tokens under a grammar, and whether it came to its end."""
    tokens = llguidance.LLTokenizer(bpe.to_str(), eos_token=[0])
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
    said = list(bpe.encode(begun).ids)
    assert matcher.consume_tokens(said), (begun, grammar)
    for _ in range(150):
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        token = int(dice.choice(list(allowed)))
        if token == 0:
            return bpe.decode(said, skip_special_tokens=False), True
        assert matcher.consume_tokens([token])
        said.append(token)
    return bpe.decode(said, skip_special_tokens=False), False


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("formed", [False, True])
def test_whatever_tokens_are_drawn_there_are_words_or_valid_calls_and_no_marker(
    bpe: Tokenizer, parser: ToolCallFormat, choice: str, formed: bool
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    fields: dict[str, Any] = {"tool_choice": choice, "n": 1}
    if formed:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}
        fields["response_format"] = form
    schemas = {"moon": DAY, "trap": TRAP}
    body = ChatRequest.model_validate(
        chat(function("moon", DAY, True), function("trap", TRAP, True), **fields)
    )
    calling = tool_call_rules_of(body, parser)
    wanted = grammar_of_chat(body, calling)
    assert wanted is not None
    begun = [""]
    if calling is not None and calling.place == "exact":
        begun += (
            ["A <tool_", "<tool_call>", "Hi <tool_call>"] if parser == "hermes" else ["{", '{"']
        )
    for _ in range(by_day(10, at_night=100)):
        text, ended = sampled(bpe, wanted.grammar, dice.choice(begun), dice)
        reader = ToolCallParser.of(calling) if calling else None
        if reader is None:
            jsonschema.validate(json.loads(text), ANSWER)
            continue
        words, calls = reader.feed(text)
        rest, last = reader.finish(cut=not ended)
        words, calls = words + rest, calls + last
        for call in calls:
            if call.whole:
                jsonschema.validate(json.loads(call.arguments), schemas[call.name])
            else:
                assert not ended
        if choice == "required":
            assert not words
            assert calls or not ended
        elif formed and ended and not calls:
            jsonschema.validate(json.loads(words), ANSWER)
        elif not formed:
            assert "<tool_call>" not in words


def test_a_grammar_is_made_of_what_may_be_called() -> None:
    body = ChatRequest.model_validate(
        chat(MOON, LOOSE, tool_choice={"type": "function", "function": {"name": "moon"}})
    )
    calling = tool_call_rules_of(body, "hermes")
    assert calling == ToolCallRules(format="hermes", names=("moon",), max_calls=1, place="only")
    wanted = grammar_of_chat(body, calling)
    assert isinstance(wanted, RequestedGrammar)
    assert "tide" not in wanted.grammar


def test_an_answer_of_a_form_leaves_no_room_for_calls_that_are_whole_answers() -> None:
    body = ChatRequest.model_validate(chat(MOON, response_format={"type": "json_object"}))
    assert tool_call_rules_of(body, "llama3_json") is None
    assert grammar_of_chat(body, None) == body.requested_grammar()


def test_llamas_calls_under_a_grammar_begin_with_the_name() -> None:
    reader = ToolCallParser("llama3_json", 9, ("moon",), "exact")
    other = '{"parameters": {"day": "x"}, "name": "moon"}'
    assert reader.feed(other) == ("", [])
    assert reader.finish() == (other, [])
    reader = ToolCallParser("llama3_json", 9, ("moon",), "exact")
    reader.feed(LLAMA)
    assert len(reader.finish()[1]) == 1
