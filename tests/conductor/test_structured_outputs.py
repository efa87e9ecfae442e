"""What clients ask of an answer's form becomes one grammar, or a 400 that names the field."""

import json
from typing import Any

import pytest

from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.conductor.fronts import CHAT, Front, open_front

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def formed(schema: Any, **more: Any) -> dict[str, Any]:
    wanted = {"name": "s", "schema": schema, **more}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


def structured(**wish: Any) -> dict[str, Any]:
    return {"structured_outputs": wish}


OBJECT = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("fields", "taken", "refused"),
    [
        (OBJECT, '{"b": [1]}', "[1]"),
        (formed(SCHEMA, strict=True), '{"a": 1}', '{"b": 1}'),
        (formed(SCHEMA), '{\n  "a": 1\n}', '{"a": 1, "b": 2}'),
        ({"guided_json": SCHEMA}, '{"a":1}', '{"a":"1"}'),
        ({"guided_json": json.dumps(SCHEMA)}, '{"a":1}', '{"a":"1"}'),
        ({"guided_regex": "a/b+|[0-9]{2}"}, "a/bb", "123"),
        ({"guided_regex": "^moon$"}, "moon", "the moon"),
        ({"guided_choice": ["half 半", 'qu"ote\n']}, 'qu"ote\n', "half"),
        ({"guided_choice": ["half 半"]}, "half 半", "half"),
        ({"guided_grammar": 'start: "a" b*\nb: "b"'}, "abb", "ba"),
        ({"guided_grammar": 'root ::= "a" b*\nb ::= "b"'}, "abb", "ba"),
        (structured(json=SCHEMA), '{"a":1}', "{}"),
        (structured(regex="a+"), "aaa", "ab"),
        (structured(choice=["x", "y"]), "y", "xy"),
        (structured(grammar="start: /x/ /y/"), "xy", "x"),
        (structured(json_object=True), "{}", "1"),
    ],
)
async def test_a_wish_becomes_a_grammar_of_exactly_such_texts(
    front: Front, fields: dict[str, Any], taken: str, refused: str
) -> None:
    await front.ask(CHAT, fields)
    assert front.fits(taken)
    assert not front.fits(refused)


def chain(n: int) -> dict[str, Any]:
    """Definitions that lead to one another, one after the other."""
    links = {f"d{i}": {"properties": {"p": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(n)}
    return {"$defs": {**links, f"d{n}": {}}, "$ref": "#/$defs/d0"}


def nested(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(n):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format", "not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (formed({"type": "foo"}), "response_format", "foo"),
        (formed({"not": {}}), "response_format", "not"),
        ({"guided_json": "[1"}, "guided_json", "can't be used"),
        ({"guided_json": "[1]"}, "guided_json", "not a JSON object"),
        ({"guided_json": "{" + " " * 300_000 + "}"}, "guided_json", "over the 262144"),
        ({"guided_json": {"enum": ["\ud800"]}}, "guided_json", "not Unicode text"),
        ({"guided_json": {"x-guidance": 1}}, "guided_json", "x-guidance"),
        ({"guided_json": chain(200)}, "guided_json", "over the 128"),
        ({"guided_json": nested(150)}, "guided_json", "recursion"),
        ({"guided_json": {"description": "x" * 70_000}}, "guided_json", "65536"),
        ({"guided_json": {"$ref": "file:///etc/hostname"}}, "guided_json", "does not compile"),
        ({"guided_regex": "("}, "guided_regex", "unclosed"),
        ({"guided_regex": "a(?=b)"}, "guided_regex", "look-"),
        ({"guided_grammar": "start: ("}, "guided_grammar", "does not compile"),
        ({"guided_grammar": "start: " + '"a" ' * 4000}, "guided_grammar", "over the 3000"),
        (structured(), "structured_outputs", "exactly one"),
        (structured(regex="a", choice=["b"]), "structured_outputs", "has 2"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "send one of them"),
        ({**OBJECT, "guided_regex": "a"}, "guided_regex", "send one of them"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "leave out"),
    ],
)
async def test_what_can_not_be_had_is_refused_by_name_and_nothing_is_spent(
    front: Front, fields: dict[str, Any], param: str, words: str
) -> None:
    error = await front.refused(CHAT, fields)
    assert error["param"] == param and words in error["message"]


async def test_a_fake_model_has_no_texts_to_keep_to_a_grammar(gateway: ScriptedGateway) -> None:
    async with open_front(gateway, FakeTokenizer()) as front:
        error = await front.refused(CHAT, guided_regex="a")
    assert (error["param"], error["code"]) == ("guided_regex", "not_supported")
