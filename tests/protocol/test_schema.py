"""The schema of messages says what each field means, in which unit, and within which limits."""

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from halfmoon_protocol import schema
from halfmoon_protocol.schema.schema_faults import schema_faults
from halfmoon_protocol.schema.units import UNITS

GENERATED = json.loads(schema.artefacts()["schema/messages.json"])


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
