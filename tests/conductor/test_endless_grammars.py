"""Grammars that a model could begin and never end are refused before anything is computed."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
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
from halfmoon_testing.conductor_http import ScriptedGateway

OBJECT = {"type": "object", "additionalProperties": False}
CHAT = {"model": "lab/moon", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def checker(bpe: Tokenizer) -> Iterator[GrammarChecker]:
    made = GrammarChecker(CheckArgument(bpe.to_str(), bpe.get_vocab_size(), (0,)))
    yield made
    made.close()


def requiring(name: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the schema of an object that requires one property."""
    return {**OBJECT, "properties": {name: schema}, "required": [name], **more}


def ref(place: str) -> dict[str, Any]:
    return {"$ref": place}


def array(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


ENDLESS = {
    "a property that is itself": (
        requiring("a", ref("#/properties/a")),
        "#/properties/a → #/properties/a",
    ),
    "an optional property that is itself": (
        {**OBJECT, "properties": {"a": ref("#/properties/a")}},
        "#/properties/a → #/properties/a",
    ),
    "after other properties": (
        {
            **OBJECT,
            "properties": {"n": {"type": "integer"}, "a": ref("#/properties/a")},
            "required": ["n", "a"],
        },
        "#/properties/a → #/properties/a",
    ),
    "the root that is itself": (ref("#"), "# → #"),
    "two definitions that are each other": (
        {
            "$defs": {"a": ref("#/$defs/b"), "b": ref("#/$defs/a")},
            **requiring("p", ref("#/$defs/a")),
        },
        "#/$defs/a → #/$defs/b → #/$defs/a",
    ),
    "an object that requires itself": (requiring("a", ref("#")), "# → #"),
    "an object that requires itself in an array": (
        requiring("a", array(ref("#"), minItems=1)),
        "# → #",
    ),
    "a tuple of itself": (
        {"type": "array", "prefixItems": [ref("#")], "minItems": 1, "items": False},
        "# → #",
    ),
    "all of it": (
        {
            "$defs": {"n": requiring("next", {"allOf": [ref("#/$defs/n")]})},
            **requiring("list", ref("#/$defs/n")),
        },
        "#/$defs/n → #/$defs/n",
    ),
    "all branches": (
        {"anyOf": [array(ref("#"), minItems=1), requiring("a", ref("#"))]},
        "# → #",
    ),
    "by an anchor": (
        {"$defs": {"a": {"$anchor": "x", **requiring("a", ref("#x"))}}, "$ref": "#x"},
        "#x → #x",
    ),
    "by an id": (
        {"$id": "http://halfmoon.example/s", **requiring("a", ref("http://halfmoon.example/s"))},
        "http://halfmoon.example/s → http://halfmoon.example/s",
    ),
    "other properties": (
        {"type": "object", "additionalProperties": ref("#"), "required": ["x"]},
        "# → #",
    ),
    "properties by their pattern": (
        {"type": "object", "patternProperties": {"^x": ref("#")}, "required": ["xy"]},
        "# → #",
    ),
}
ENDING = {
    "a tree": requiring("children", array(ref("#"))),
    "a list that null ends": requiring("next", {"anyOf": [{"type": "null"}, ref("#")]}),
    "an optional child": {**OBJECT, "properties": {"child": ref("#")}},
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
        "$defs": {"a": requiring("a", ref("#/$defs/a"))},
        "type": "integer",
    },
    "a property that may not be there": {
        **OBJECT,
        "properties": {"a": False, "b": {"type": "integer"}},
    },
    "an array that must be empty": array(ref("#"), maxItems=0),
    "a name with blanks and arrows": {
        "$defs": {"a ⇦ b": {"anyOf": [{"type": "null"}, array(ref("#/$defs/a%20%E2%87%A6%20b"))]}},
        "$ref": "#/$defs/a%20%E2%87%A6%20b",
    },
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_schema_without_a_finite_answer_is_refused_with_its_circle(
    checker: GrammarChecker, name: str
) -> None:
    schema, circle = ENDLESS[name]
    with pytest.raises(UnusableGrammar) as refused:
        await checker.check(RequestedGrammar(grammar_of_schema(schema), "response_format"))
    assert f"needs itself without an end: {circle};" in refused.value.message


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
        ('start: "q" x\nx: "n" | %json ' + json.dumps(requiring("a", ref("#"))), "# → #"),
        ('start: "ab" /[^\\s\\S]/', "a pattern in start that matches no text"),
        ('start: "ab" (x | "c" y)\nx: "d"\ny: /[^\\s\\S]/', "that matches no text"),
    ],
)
async def test_a_grammar_that_does_not_end_is_refused_with_its_rules(
    checker: GrammarChecker, grammar: str, reason: str
) -> None:
    with pytest.raises(UnusableGrammar) as refused:
        await checker.check(RequestedGrammar(grammar, "guided_grammar", from_client=True))
    assert reason in refused.value.message


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start ")" | "x"',
        'start: start "," /[a-z]/ | /[a-z]/',
        'start: "k" (a | "y")\na: a "x"',  # `a` can't begin, so a model never comes to it
        'start: "k"\nunused: "x" unused',
        'root ::= item ("," item)*\nitem ::= [a-z]+ | "(" root ")"',
    ],
)
async def test_a_grammar_that_can_end_everywhere_is_used(
    checker: GrammarChecker, grammar: str
) -> None:
    assert await checker.check(RequestedGrammar(grammar, "guided_grammar", from_client=True))


async def test_a_pattern_that_matches_nothing_is_refused(checker: GrammarChecker) -> None:
    requested = RequestedGrammar(grammar_of_regex(r"a[^\s\S]"), "guided_regex")
    with pytest.raises(UnusableGrammar, match=r"guided_regex .*matches no text"):
        await checker.check(requested)


@pytest.mark.parametrize("place", ["response_format", "tools"])
async def test_an_endless_schema_is_a_400_with_its_field_and_a_code(
    client: httpx.AsyncClient, gateway: ScriptedGateway, place: str
) -> None:
    schema = requiring("a", ref("#"))
    function = {"name": "f", "parameters": schema}
    fields: dict[str, dict[str, Any]] = {
        "response_format": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": schema},
            }
        },
        "tools": {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
        },
    }
    answer = await client.post("/v1/chat/completions", json={**CHAT, **fields[place]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, place, "invalid_grammar")
    assert "# → #" in error["message"]
    assert not gateway.requests
