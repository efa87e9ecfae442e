"""Read the tables of docs/api.md: what becomes of each field of each route, with an example."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
_HEADER = re.compile(r"^\| field \| ((?:\w+ \| )+)example \|", re.M)
_ROW = re.compile(r"^\| `(\w+)` \| ((?:(?:works|refused|label|–) \| )+)`(\{.*\})` \|")


class PageCase(NamedTuple):
    """A field in the column of a route."""

    route: str
    field: str
    mark: str
    example: dict[str, Any]


def page_cases() -> Iterator[PageCase]:
    """Return all fields of all columns."""
    routes: list[str] = []
    for line in PAGE.read_text().splitlines():
        if header := _HEADER.match(line):
            routes = header[1].split(" | ")[:-1]
        elif row := _ROW.match(line):
            for route, mark in zip(routes, row[2].split(" | ")[:-1], strict=True):
                if mark != "–":
                    yield PageCase(route, row[1], mark, json.loads(row[3]))
