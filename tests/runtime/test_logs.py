"""Logs and metrics as whoever operates a service reads them."""

import contextvars
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog

from halfmoon_runtime.observability.logs import bind_request, configure_logging


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_lines_say_who_what_and_for_which_request(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("decode", "decode-0", "info", "json")
    log = structlog.get_logger("test")

    def serve() -> None:
        bind_request("cmpl-1")
        log.info("landed", pages=3)
        logging.getLogger("a.library").warning("%s is odd", "this")

    contextvars.copy_context().run(serve)
    log.info("idle", odd={1, 2} - {2})
    log.debug("unheard")
    landed, odd, idle = lines(capsys)
    del landed["timestamp"]
    who = {"service": "decode", "worker_id": "decode-0", "request_id": "cmpl-1"}
    assert landed.items() >= {"event": "landed", "pages": 3, "level": "info", **who}.items()
    assert odd["event"] == "this is odd"
    assert odd["request_id"] == "cmpl-1"
    assert "request_id" not in idle


def test_console_lines_have_whole_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("decode", "decode-0")
    try:
        raise ValueError("boom")
    except ValueError:
        structlog.get_logger("test").exception("failed")
    told = capsys.readouterr().err
    assert "failed" in told
    assert "worker_id=decode-0" in told
    assert "Traceback" in told
    assert "ValueError: boom" in told


def test_libraries_draw_no_bars_of_progress_into_a_log() -> None:
    script = (
        "from halfmoon_runtime.observability.logs import configure_logging\n"
        "configure_logging('decode', 'decode-0')\n"
        "from huggingface_hub.utils import are_progress_bars_disabled\n"
        "print(are_progress_bars_disabled())\n"
    )
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=plain, check=True
    )
    assert done.stdout == "True\n"
