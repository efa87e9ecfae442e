"""Grammars that a model could begin and never end are refused before anything is computed."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from halfmoon_conductor.errors import UnusableGrammar
from halfmoon_conductor.grammar.grammar_check_handler import CheckArgument
from halfmoon_conductor.grammar.grammar_checker import GrammarChecker
from halfmoon_conductor.grammar.grammars import (
    RequestedGrammar,
    grammar_of_regex,
    grammar_of_schema,
)
from tests.conductor.fronts import CHAT, Front

OBJECT = {"type": "object", "additionalProperties": False}


@pytest.fixture(scope="module")
def checker(bpe: Tokenizer) -> Iterator[GrammarChecker]:
    made = GrammarChecker(CheckArgument(bpe.to_str(), bpe.get_vocab_size(), (0,)))
    yield made
    made.close()


def requiring(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object that requires one property."""
    return {**OBJECT, "properties": {name: schema}, "required": [name]}


def ref(place: str) -> dict[str, Any]:
    return {"$ref": place}


def array(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


ITSELF, A_LIST = ref("#"), array(ref("#"), minItems=1)
OF_A = ref("#/properties/a")
ID = "http://halfmoon.example/s"
#: Schemas, and the circle that each is refused with.
ENDLESS: dict[str, tuple[dict[str, Any], str]] = {
    "a property that is itself": (requiring("a", OF_A), "#/properties/a → #/properties/a"),
    "an optional property that is itself": (
        {**OBJECT, "properties": {"a": OF_A}}, "#/properties/a → #/properties/a"),
    "after other properties": (
        {**OBJECT, "properties": {"n": {"type": "integer"}, "a": OF_A}, "required": ["n", "a"]},
        "#/properties/a → #/properties/a"),
    "the root that is itself": (ITSELF, "# → #"),
    "two definitions that are each other": (
        {"$defs": {"a": ref("#/$defs/b"), "b": ref("#/$defs/a")},
         **requiring("p", ref("#/$defs/a"))},
        "#/$defs/a → #/$defs/b → #/$defs/a"),
    "an object that requires itself": (requiring("a", ITSELF), "# → #"),
    "an object that requires itself in an array": (requiring("a", A_LIST), "# → #"),
    "a tuple of itself": (
        {"type": "array", "prefixItems": [ITSELF], "minItems": 1, "items": False}, "# → #"),
    "all of it": (
        {"$defs": {"n": requiring("next", {"allOf": [ref("#/$defs/n")]})},
         **requiring("list", ref("#/$defs/n"))},
        "#/$defs/n → #/$defs/n"),
    "all branches": ({"anyOf": [A_LIST, requiring("a", ITSELF)]}, "# → #"),
    "by an anchor": (
        {"$defs": {"a": {"$anchor": "x", **requiring("a", ref("#x"))}}, "$ref": "#x"}, "#x → #x"),
    "by an id": ({"$id": ID, **requiring("a", ref(ID))}, f"{ID} → {ID}"),
    "other properties": (
        {"type": "object", "additionalProperties": ITSELF, "required": ["x"]}, "# → #"),
    "properties by their pattern": (
        {"type": "object", "patternProperties": {"^x": ITSELF}, "required": ["xy"]}, "# → #"),
}  # fmt: skip
ENDING: dict[str, dict[str, Any]] = {
    "a tree": requiring("children", array(ITSELF)),
    "a list that null ends": requiring("next", {"anyOf": [{"type": "null"}, ITSELF]}),
    "an optional child": {**OBJECT, "properties": {"child": ITSELF}},
    "a choice that is itself or a number": {
        "$defs": {"a": {"anyOf": [ref("#/$defs/a"), {"type": "integer"}]}},
        **requiring("p", ref("#/$defs/a")),
    },
    "an expression": {
        "$defs": {
            "term": {"anyOf": [{"type": "number"}, ref("#/$defs/sum")]},
            "sum": requiring("of", array(ref("#/$defs/term"), minItems=2)),
        },
        "$ref": "#/$defs/sum",
    },
    "an endless definition that nothing uses": {
        "$defs": {"a": requiring("a", ref("#/$defs/a"))}, "type": "integer",
    },
    "a property that may not be there": {
        **OBJECT, "properties": {"a": False, "b": {"type": "integer"}},
    },
    "an array that must be empty": array(ITSELF, maxItems=0),
    "a name with blanks and arrows": {
        "$defs": {"a ⇦ b": {"anyOf": [{"type": "null"}, array(ref("#/$defs/a%20%E2%87%A6%20b"))]}},
        "$ref": "#/$defs/a%20%E2%87%A6%20b",
    },
}  # fmt: skip


async def refusal(checker: GrammarChecker, grammar: str, field: str, **own: bool) -> str:
    with pytest.raises(UnusableGrammar) as refused:
        await checker.check(RequestedGrammar(grammar, field, **own))
    return refused.value.message


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_schema_without_a_finite_answer_is_refused_with_its_circle(
    checker: GrammarChecker, name: str
) -> None:
    schema, circle = ENDLESS[name]
    message = await refusal(checker, grammar_of_schema(schema), "response_format")
    assert f"needs itself without an end: {circle};" in message


@pytest.mark.parametrize("name", ENDING)
async def test_a_recursive_schema_with_finite_answers_is_used(
    checker: GrammarChecker, name: str
) -> None:
    requested = RequestedGrammar(grammar_of_schema(ENDING[name]), "response_format")
    assert await checker.check(requested) == requested.grammar


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: start "a"', "start → start"),
        ('start: "a" start', "start → start"),
        ('start: "xy" a\na: b "c"\nb: "" a', "a → b → a"),
        ('start: "xy" a?\na: "x" a', "a → a"),
        ('root ::= "(" root ")"', "start → start"),
        ('root ::= "a" item*\nitem ::= "," item', "item → item"),
        ('start: "q" x\nx: "n" | %json ' + json.dumps(requiring("a", ITSELF)), "# → #"),
        ('start: "ab" /[^\\s\\S]/', "a pattern in start that matches no text"),
        ('start: "ab" (x | "c" y)\nx: "d"\ny: /[^\\s\\S]/', "that matches no text"),
    ],
)
async def test_a_grammar_that_does_not_end_is_refused_with_its_rules(
    checker: GrammarChecker, grammar: str, reason: str
) -> None:
    assert reason in await refusal(checker, grammar, "guided_grammar", from_client=True)


async def test_a_grammar_that_can_end_everywhere_is_used(checker: GrammarChecker) -> None:
    for grammar in (
        'start: "(" start ")" | "x"',
        'start: start "," /[a-z]/ | /[a-z]/',
        'start: "k" (a | "y")\na: a "x"',  # `a` can't begin, so a model never comes to it
        'start: "k"\nunused: "x" unused',
        'root ::= item ("," item)*\nitem ::= [a-z]+ | "(" root ")"',
    ):
        assert await checker.check(RequestedGrammar(grammar, "guided_grammar", from_client=True))


async def test_a_pattern_that_matches_nothing_is_refused(checker: GrammarChecker) -> None:
    message = await refusal(checker, grammar_of_regex(r"a[^\s\S]"), "guided_regex")
    assert "guided_regex " in message and "matches no text" in message


@pytest.mark.parametrize("place", ["response_format", "tools"])
async def test_an_endless_schema_is_a_400_with_its_field_and_a_code(
    front: Front, place: str
) -> None:
    schema = requiring("a", ITSELF)
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    fields: dict[str, dict[str, Any]] = {
        "response_format": {"response_format": form},
        "tools": {"tools": [tool], "tool_choice": "required"},
    }
    error = await front.refused(CHAT, fields[place])
    assert (error["param"], error["code"]) == (place, "invalid_grammar")
    assert "# → #" in error["message"]
