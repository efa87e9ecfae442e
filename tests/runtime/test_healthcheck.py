"""The health check of containers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon_runtime.healthcheck import STATUS_FILE, find_problem
from halfmoon_testing.scripted_endpoint import ScriptedEndpoint


@pytest.fixture
def status(tmp_path: Path) -> Path:
    return tmp_path / "status.json"


@pytest.fixture
def url() -> Iterator[str]:
    with ScriptedEndpoint() as endpoint:
        endpoint.pages = {"/ready": {}, "/health": {}}
        yield endpoint.url


NOT_FOUND = 'answers 404: {"detail": "Not Found"}'


def test_a_service_is_well_while_it_says_that_it_serves(status: Path) -> None:
    assert "is not set" in (find_problem({}) or "")
    assert "can't be read" in (find_problem({STATUS_FILE: str(status)}) or "")
    status.write_text("[]")
    assert "can't be read" in (find_problem({STATUS_FILE: str(status)}) or "")
    for stage in ("ready", "draining", "loading", "failed"):
        status.write_text(json.dumps({"stage": stage}))
        found = None if stage in ("ready", "draining") else f"the service is {stage}"
        assert find_problem({STATUS_FILE: str(status)}) == found


def test_a_url_must_answer_too(status: Path, url: str) -> None:
    status.write_text(json.dumps({"stage": "ready"}))
    environment = {STATUS_FILE: str(status)}
    assert find_problem(environment, f"{url}/ready") is None
    assert find_problem(environment, f"{url}/other") == f"{url}/other {NOT_FOUND}"
    assert "does not answer" in (find_problem(environment, "http://127.0.0.1:9/ready") or "")


def test_the_service_is_asked_where_it_says(status: Path, url: str) -> None:
    environment = {STATUS_FILE: str(status)}
    status.write_text(json.dumps({"stage": "ready", "operators": url}))
    assert find_problem(environment) is None
    status.write_text(json.dumps({"stage": "ready", "operators": f"{url}/stuck"}))
    assert find_problem(environment) == f"{url}/stuck/health {NOT_FOUND}"
