"""The Grafana board has only fields that Grafana's own types have."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sdk = pytest.importorskip("grafana_foundation_sdk")
from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: E402
from grafana_foundation_sdk.cog.plugins import register_default_plugins  # noqa: E402
from grafana_foundation_sdk.models.dashboard import Dashboard  # noqa: E402

BOARD = Path(__file__).parents[2] / "deploy/grafana/dashboards/halfmoon.json"


def read_by_grafana(board: dict[str, Any]) -> Any:
    """What is left of a board in the types that Grafana publishes, made from its schemas."""
    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))


def differences(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    """Paths of what is in the first value and not, or not the same, in the second one."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            if name in theirs:
                yield from differences(value, theirs[name], f"{where}/{name}")
            else:
                yield f"{where}/{name}"
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{where}/{i}")
    elif ours != theirs:
        yield where


def test_every_field_of_the_board_is_one_of_grafanas() -> None:
    board = json.loads(BOARD.read_text())
    assert list(differences(board, read_by_grafana(board))) == []
