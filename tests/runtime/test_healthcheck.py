"""The health check of containers."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon_runtime.healthcheck import STATUS_FILE, find_problem


@pytest.fixture
def status(tmp_path: Path) -> Path:
    return tmp_path / "status.json"


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path in ("/ready", "/health") else 503)
        self.end_headers()
        self.wfile.write(b"no decode worker")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_service_is_well_while_it_serves(status: Path) -> None:
    for stage in ("ready", "draining", "loading", "failed"):
        status.write_text(json.dumps({"stage": stage}))
        found = None if stage in ("ready", "draining") else f"the service is {stage}"
        assert find_problem({STATUS_FILE: str(status)}) == found


def test_a_service_that_has_said_nothing_is_not_well(status: Path) -> None:
    assert "can't be read" in (find_problem({STATUS_FILE: str(status)}) or "")
    status.write_text("[]")
    assert "can't be read" in (find_problem({STATUS_FILE: str(status)}) or "")
    assert "is not set" in (find_problem({}) or "")


def test_a_url_must_answer_too(status: Path, url: str) -> None:
    status.write_text(json.dumps({"stage": "ready"}))
    environment = {STATUS_FILE: str(status)}
    assert find_problem(environment, f"{url}/ready") is None
    assert find_problem(environment, f"{url}/other") == f"{url}/other answers 503: no decode worker"
    assert "does not answer" in (find_problem(environment, "http://127.0.0.1:9/ready") or "")


def test_the_service_is_asked_where_it_says(status: Path, url: str) -> None:
    environment = {STATUS_FILE: str(status)}
    status.write_text(json.dumps({"stage": "ready", "operators": url}))
    assert find_problem(environment) is None
    status.write_text(json.dumps({"stage": "ready", "operators": f"{url}/stuck"}))
    assert find_problem(environment) == f"{url}/stuck/health answers 503: no decode worker"
