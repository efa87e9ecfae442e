"""A conductor by itself, asked under names that are not its own."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import lone_conductor

pytestmark = pytest.mark.e2e

REBOUND = {"host": "rebound.example:8000"}


def statuses(told: dict[str, Any], headers: dict[str, str]) -> dict[str, int]:
    """Ask each port, and return the statuses by what was asked."""
    rest, metadata, operators = told["url"], told["metadata"], told["operators"]
    asked = [
        *(("GET", f"{rest}{path}") for path in ("/v1/models", "/", "/debug/cluster", "/metrics")),
        ("POST", f"{rest}/v1/completions"),
        ("GET", f"{metadata}?prefix="),
        ("PUT", f"{metadata}?key=k"),
        ("GET", f"{operators}/metrics"),
    ]
    with httpx.Client(trust_env=False, timeout=30, headers=headers) as client:
        return {
            f"{method} {url}": client.request(method, url, content=b"{}").status_code
            for method, url in asked
        }


def test_without_keys_no_port_answers_to_a_name_of_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HALFMOON_CLUSTER_KEY", "HALFMOON_CLUSTER_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    with lone_conductor(tmp_path, "--allowed-hosts", "llm.example") as process:
        told = process.status
        assert set(statuses(told, REBOUND).values()) == {421}
        for ours in ({}, {"host": "llm.example"}, {"host": "localhost:1"}):
            assert 421 not in statuses(told, ours).values()
        refused = httpx.get(f"{told['url']}/v1/models", headers=REBOUND, trust_env=False)
        assert "--allowed-hosts rebound.example" in refused.json()["error"]["message"]
        for probe in (f"{told['url']}/health", f"{told['operators']}/health"):
            assert httpx.head(probe, headers=REBOUND, trust_env=False).status_code == 200
