"""A strict function's arguments keep to its schema whenever it is called, whatever the choice."""

import json
import random
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from tokenizers import Tokenizer

from halfmoon_conductor.api.openai.openai_requests import ChatRequest
from halfmoon_conductor.engine_io.tool_call_rules import ToolCallFormat
from halfmoon_conductor.inputs.tool_constraints import grammar_of_chat, tool_call_rules_of
from halfmoon_conductor.tools.tool_call_parser import ToolCallParser
from tests.conductor.fronts import BODIES, CHAT, Front
from tests.conductor.tool_requests import DAY, TOOL_PATHS, a_call, function, with_tools
from tests.nightly import by_day

pytestmark = pytest.mark.usefixtures("room")
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
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}
CALL, TIDE = a_call("moon", '{"day": 3}'), a_call("tide", '{"any": [1]}')
LLAMA = '{"name": "moon", "parameters": {"day": 3}}'
MOON, LOOSE = function("moon", DAY, True), function("tide")


@pytest.mark.parametrize("path", TOOL_PATHS.values())
async def test_free_text_is_any_and_what_begins_a_call_keeps_to_the_schema(
    front: Front, path: str
) -> None:
    await front.ask(path, with_tools(path, MOON, LOOSE))
    for text in (
        "",
        "The moon is <half> full.\n",
        CALL,
        f"Let me see: {CALL}\n{CALL}",
        f"a <tool_{CALL}\n{TIDE}",
    ):
        assert front.fits(text), text
    for text in (
        CALL.replace("3", '"x"'),
        CALL.replace('"day": 3', ""),
        CALL.replace("moon", "sun"),
        f"See: {CALL.replace('3', '3.5')}",
        f"{TIDE}\n{CALL.replace('3', '100')}",
        "<tool_call>moon</tool_call>",
        "Call it by <tool_call> some words",
    ):
        assert not front.fits(text), text
    await front.ask(path, with_tools(path, {**MOON, "strict": False}, LOOSE))
    assert front.grammar == "", "without a strict function nothing constrains an answer"


async def test_a_model_does_not_hear_of_strict(front: Front) -> None:
    for strict in (True, False, None):
        await front.ask(CHAT, with_tools(CHAT, {**MOON, "strict": strict}))
    assert len({each.prompt_token_ids for each in front.gateway.requests}) == 1
    assert "moon" in front.prompt()


async def test_a_strict_function_without_parameters_takes_none(front: Front) -> None:
    for choice in ("auto", "required"):
        await front.ask(CHAT, with_tools(CHAT, function("tide", None, True), choice=choice))
        assert front.fits(a_call("tide", "{}"))
        assert not front.fits(TIDE)


@pytest.mark.parametrize("strict", [True, False])
async def test_an_answer_of_a_form_may_call_instead(front: Front, strict: bool) -> None:
    tools = with_tools(CHAT, {**MOON, "strict": strict})
    await front.ask(CHAT, tools, response_format=FORM)
    assert front.fits('{"name": "moon", "n": true}')
    assert front.fits(f"{CALL}\n{CALL}")
    assert front.fits(CALL.replace("3", '"x"')) != strict
    assert not front.fits("Hello")
    assert not front.fits(f"Hello {CALL}")


@pytest.mark.parametrize(
    ("schema", "fields", "param", "words"),
    [
        (DAY, {"guided_regex": "a"}, "tools", "a strict function in tools both say"),
        (DAY, {"ignore_eos": True}, "ignore_eos", "leave out"),
        (DAY, {"ignore_eos": True, "choice": "required"}, "ignore_eos", "leave out"),
        ({"not": {}}, {}, "tools", ""),
        *(
            (schema, {"choice": choice}, "tools", "")
            for schema in ({"type": "string"}, {"type": ["string", "null"]}, {"enum": [1]})
            for choice in ("auto", "required")
        ),
    ],
)
async def test_what_a_strict_function_can_not_keep_to_is_refused_by_name(
    front: Front, schema: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    asked = with_tools(CHAT, function("moon", schema, True), **fields)
    error = await front.refused(CHAT, asked)
    assert error["param"] == param and words in error["message"]


async def test_arguments_that_need_not_be_objects_are_objects(front: Front) -> None:
    for schema in ({}, {"anyOf": [DAY, {"type": "string"}]}, {**DAY, "type": ["object", "null"]}):
        await front.ask(CHAT, with_tools(CHAT, function("moon", schema), choice="required"))
        assert front.fits(CALL)
        for other in ('"x"', "null"):
            assert not front.fits(a_call("moon", other))


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


def chat(*functions: dict[str, Any], **more: Any) -> ChatRequest:
    return ChatRequest.model_validate(BODIES[CHAT] | with_tools(CHAT, *functions, **more))


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("formed", [False, True])
def test_whatever_tokens_are_drawn_there_are_words_or_valid_calls_and_no_marker(
    bpe: Tokenizer, parser: ToolCallFormat, choice: str, formed: bool
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    schemas = {"moon": DAY, "trap": TRAP}
    fields: dict[str, Any] = {"response_format": FORM} if formed else {}
    strict = (function(name, schema, True) for name, schema in schemas.items())
    body = chat(*strict, choice=choice, n=1, **fields)
    calling = tool_call_rules_of(body, parser)
    wanted = grammar_of_chat(body, calling)
    assert wanted is not None
    begun = [""]
    if calling is not None and calling.place == "exact":
        begun += {"hermes": ["A <tool_", "<tool_call>", "Hi <tool_call>"]}.get(parser, ["{", '{"'])
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


def test_an_answer_of_a_form_leaves_no_room_for_calls_that_are_whole_answers() -> None:
    body = chat(MOON, response_format={"type": "json_object"})
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
