"""The schema of messages says what each field means, in which unit, and within which limits."""

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from halfmoon_protocol import bounds, codec, schema
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.messages.stages import ChunkSent
from halfmoon_protocol.schema.field_docs import field_docs
from halfmoon_protocol.schema.schema_faults import schema_faults
from halfmoon_protocol.schema.units import UNITS

GENERATED = json.loads(schema.artefacts()["schema/messages.json"])
DEFINED = GENERATED["$defs"]


def test_a_fields_comment_is_its_description() -> None:
    assert field_docs(ChunkSent)["start"] == "Position of the chunk's first token."
    described = DEFINED["ChunkSent"]["properties"]
    assert described["start"]["description"] == "Position of the chunk's first token."
    assert described["request_id"]["description"].startswith("Names one try")
    assert "\n" not in described["stage"]["description"]


def test_a_number_has_its_unit_and_its_limits_and_a_message_one_tag() -> None:
    assert DEFINED["Region"]["properties"]["length"] == {
        "description": "Its length; accesses beyond it are refused.",
        "type": "integer",
        "minimum": 0,
        "maximum": bounds.MAX_COUNT,
        "x-unit": "bytes",
    }
    assert DEFINED["ChunkSent"]["properties"]["type"]["const"] == "chunk_sent"


def test_positions_of_arrays_have_the_names_of_the_fields() -> None:
    score = DEFINED["TokenScore"]
    assert [each["title"] for each in score["prefixItems"]] == list(TokenScore.__struct_fields__)
    assert [each["title"] for each in score["prefixItems"][2]["items"]["prefixItems"]] == [
        "token",
        "logprob",
    ]
    assert score["prefixItems"][1]["description"].startswith("1 for the likeliest")


def test_a_list_without_a_limit_of_its_own_has_that_of_the_frame() -> None:
    assert bounds.MAX_ITEMS == codec.MAX_MESSAGE_BYTES


def test_the_schema_leaves_nothing_out() -> None:
    assert schema_faults(GENERATED) == []
    assert schema_faults(json.loads(schema.artefacts()["schema/kv_events.json"])) == []


def without(*path: str | int) -> Callable[[Any], None]:
    def remove(definitions: Any) -> None:
        for step in path[:-1]:
            definitions = definitions[step]
        del definitions[path[-1]]

    return remove


@pytest.mark.parametrize(
    ("remove", "fault"),
    [
        (without("Region", "description"), "Region: no docstring"),
        (without("Region", "properties", "length", "description"), "Region.length: no description"),
        (without("Region", "properties", "length", "x-unit"), "Region.length: no unit"),
        (without("Region", "properties", "segment", "maxLength"), "Region.segment: a text without"),
        (without("Landing", "properties", "pages", "maxItems"), "Landing.pages: a list without"),
        (without("Landing", "properties", "pages", "items", "x-unit"), "Landing.pages[]: no unit"),
        (without("TokenScore", "prefixItems", 0, "title"), "TokenScore[0]: no title"),
        (
            without("TokenScore", "prefixItems", 2, "items", "prefixItems", 1, "title"),
            "TokenScore[2][][1]: no title",
        ),
        (
            without("StartShare", "properties", "deadline_s", "anyOf", 0, "x-unit"),
            "StartShare.deadline_s: no unit",
        ),
    ],
)
def test_what_is_left_out_is_named(remove: Callable[[Any], None], fault: str) -> None:
    left_out = copy.deepcopy(GENERATED)
    remove(left_out["$defs"])
    (found,) = set(schema_faults(left_out)) - set(schema_faults(GENERATED))
    assert found.startswith(fault)


def test_the_document_explains_every_unit() -> None:
    text = (schema.HOME.parents[1] / "docs" / "protocol.md").read_text()
    table = text.partition("| `x-unit` |\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([^`]+)`", table)) == set(UNITS)
