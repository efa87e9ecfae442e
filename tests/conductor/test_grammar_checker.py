"""Grammars are checked where they can harm nothing, before anything is spent on them."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from halfmoon_conductor.errors import (
    InvalidRequest,
    ServerOverloaded,
    ServiceUnavailable,
    UnusableGrammar,
)
from halfmoon_conductor.grammar import grammar_checker
from halfmoon_conductor.grammar.grammar_check_handler import CheckArgument
from halfmoon_conductor.grammar.grammar_checker import GrammarChecker
from halfmoon_conductor.grammar.grammars import RequestedGrammar, grammar_of_schema
from halfmoon_conductor.grammar.schema_depth import MAX_SCHEMA_DEPTH, check_depth
from tests.sandbox.killed_children import kill_next_children

SPINNING = {"type": "integer", "multipleOf": 2**31}


def made_for(bpe: Tokenizer) -> Iterator[GrammarChecker]:
    made = GrammarChecker(CheckArgument(bpe.to_str(), bpe.get_vocab_size(), (0,)))
    yield made
    made.close()


@pytest.fixture
def checker(bpe: Tokenizer) -> Iterator[GrammarChecker]:
    yield from made_for(bpe)


@pytest.fixture(scope="module")
def kept(bpe: Tokenizer) -> Iterator[GrammarChecker]:
    """One for the tests that leave it as it was."""
    yield from made_for(bpe)


def wanted(grammar: str, *, own: bool = False) -> RequestedGrammar:
    return RequestedGrammar(grammar, "guided_grammar", own)


async def test_a_grammar_that_takes_too_long_is_refused_and_remembered(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_GRAMMAR_CPU_S", 0.2)
    spinning = wanted(grammar_of_schema(SPINNING))
    with pytest.raises(InvalidRequest, match=r"guided_grammar can't be used.*processor time"):
        await checker.check(spinning)
    checker.close()  # nothing can be checked any more: it is known
    with pytest.raises(InvalidRequest, match="processor time"):
        await checker.check(spinning)


async def test_the_loop_and_other_checks_go_on_meanwhile(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_GRAMMAR_CPU_S", 600.0)
    assert await checker.check(wanted('start: "a"')) == 'start: "a"'
    spinning = asyncio.create_task(checker.check(wanted(grammar_of_schema(SPINNING))))
    for i in range(20):
        assert await checker.check(wanted(f'start: "{i}"'))
        assert not spinning.done()
    spinning.cancel()
    await asyncio.gather(spinning, return_exceptions=True)


async def test_tenants_take_turns_and_none_has_all_places(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.check(wanted('start: "a"'))
    monkeypatch.setattr(grammar_checker, "MAX_GRAMMAR_CPU_S", 600.0)  # the flood's never end
    grammars = [wanted(grammar_of_schema(SPINNING | {"title": str(i)})) for i in range(80)]
    slow = [asyncio.create_task(checker.check(each, "flood")) for each in grammars]
    await asyncio.sleep(0)
    refused = [each for each in slow if each.done()]
    assert 0 < len(refused) < 20
    assert {type(each.exception()) for each in refused} == {ServerOverloaded}
    for i in range(5):
        assert await checker.check(wanted(f'start: "{i}"'), "honest")
    assert [each for each in slow if each.done()] == refused
    for each in slow:
        each.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert not checker._own_places


async def test_what_is_remembered_has_a_limit_in_bytes(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "_MAX_REMEMBERED_BYTES", 100_000)
    grammars = [wanted(f'start: "{i}" // {"x" * 20_000}') for i in range(5)]
    for grammar in grammars:
        await checker.check(grammar)
    assert len(checker._remembered) == 2
    assert checker._n_remembered_bytes <= 100_000
    checker.close()
    assert await checker.check(grammars[-1])


async def test_a_grammar_whose_children_are_killed_is_refused_for_now_and_checked_again_later(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_next_children(monkeypatch, 2)
    with pytest.raises(ServiceUnavailable, match=r"can't be checked now.*from outside") as refused:
        await checker.check(wanted('start: "a"'))
    assert refused.value.retry_after_s
    assert await checker.check(wanted('start: "a"')) == 'start: "a"'


def chained(n: int, depth: int) -> dict[str, Any]:
    def link(i: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"$ref": f"#/$defs/d{i + 1}"}
        for _ in range(depth):
            schema = {"items": schema}
        return schema

    return {"$defs": {**{f"d{i}": link(i) for i in range(n)}, f"d{n}": {}}, "$ref": "#/$defs/d0"}


def test_depth_is_counted_through_references_in_time_of_the_schemas_size() -> None:
    check_depth(chained(10, 10))
    with pytest.raises(ValueError, match=f"over {MAX_SCHEMA_DEPTH} levels"):
        check_depth(chained(110, 15))
    both = [{"$ref": f"#/$defs/d{i}"} for i in range(60)]
    links = {f"d{i}": {"anyOf": both[i + 1 :]} for i in range(60)}
    check_depth({"$defs": links, "$ref": "#/$defs/d0"}, limit=500)  # 2**59 paths


def test_a_recursive_schema_is_as_deep_as_it_is_written() -> None:
    tree = {"type": "object", "properties": {"children": {"items": {"$ref": "#"}}}}
    check_depth(tree, limit=4)
    with pytest.raises(ValueError):
        check_depth(tree, limit=3)


def test_references_that_lead_nowhere_are_left_to_the_library() -> None:
    for reference in ("#/$defs/none", "#/a/0/b", "#nowhere", "other.json#/x", 5):
        check_depth({"$ref": reference, "a": [1]})


# -- grammars that a model could begin and never end ----------------------------------------------

OBJECT = {"type": "object", "additionalProperties": False}


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
    "after other properties": (
        {**OBJECT, "properties": {"n": {"type": "integer"}, "a": OF_A}, "required": ["n", "a"]},
        "#/properties/a → #/properties/a"),
    "the root that is itself": (ITSELF, "# → #"),
    "two definitions that are each other": (
        {"$defs": {"a": ref("#/$defs/b"), "b": ref("#/$defs/a")},
         **requiring("p", ref("#/$defs/a"))},
        "#/$defs/a → #/$defs/b → #/$defs/a"),
    "an object that requires itself in an array": (requiring("a", A_LIST), "# → #"),
    "a tuple of itself": (
        {"type": "array", "prefixItems": [ITSELF], "minItems": 1, "items": False}, "# → #"),
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


async def refusal(kept: GrammarChecker, grammar: str, field: str, **own: bool) -> str:
    with pytest.raises(UnusableGrammar) as refused:
        await kept.check(RequestedGrammar(grammar, field, **own))
    return refused.value.message


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_schema_without_a_finite_answer_is_refused_with_its_circle(
    kept: GrammarChecker, name: str
) -> None:
    schema, circle = ENDLESS[name]
    message = await refusal(kept, grammar_of_schema(schema), "response_format")
    assert f"needs itself without an end: {circle};" in message


@pytest.mark.parametrize("name", ENDING)
async def test_a_recursive_schema_with_finite_answers_is_used(
    kept: GrammarChecker, name: str
) -> None:
    requested = RequestedGrammar(grammar_of_schema(ENDING[name]), "response_format")
    assert await kept.check(requested) == requested.grammar


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
    kept: GrammarChecker, grammar: str, reason: str
) -> None:
    assert reason in await refusal(kept, grammar, "guided_grammar", from_client=True)


async def test_a_grammar_that_can_end_everywhere_is_used(kept: GrammarChecker) -> None:
    for grammar in (
        'start: "(" start ")" | "x"',
        'start: start "," /[a-z]/ | /[a-z]/',
        'start: "k" (a | "y")\na: a "x"',  # `a` can't begin, so a model never comes to it
        'start: "k"\nunused: "x" unused',
        'root ::= item ("," item)*\nitem ::= [a-z]+ | "(" root ")"',
    ):
        assert await kept.check(RequestedGrammar(grammar, "guided_grammar", from_client=True))
