"""An engine that can't compute any more ends its worker at once, and costs the client no token."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from halfmoon_engine.fake_engine import FakeEngine, parse_fake_spec
from tests.e2e.test_faults import chosen, stream, text_of

pytestmark = pytest.mark.e2e

StartCluster = Callable[..., Any]
PROMPT = [i % 900 for i in range(4000)]
MEMBERS = "halfmoon/members/"


@pytest.fixture
def model(tmp_path: Path) -> str:
    return f"fake://slow?step_s=0.004&max_context=8192&lost_by={quote(str(tmp_path / 'lost'))}"


def expected_text(model: str, n_new: int) -> str:
    tokens = FakeEngine(parse_fake_spec(model), block_size=64).expected(PROMPT, n_new)
    return "".join(f" t{token}" for token in tokens)


def check_end(cluster: Any, name: str) -> None:
    """Check what a lost engine's worker leaves behind: one line, a status, and no lease."""
    process = cluster.process(name)
    cluster.until(lambda: process.exit_code is not None)
    there = httpx.get(cluster.metadata_url, params={"prefix": MEMBERS}, timeout=10).json()
    assert MEMBERS + name not in there and len(there) == 3
    assert process.exit_code == 1
    assert process.status["error"] == "EngineLost: a fake rank ended"
    lines = process.log_path.read_text().splitlines()
    said = [line for line in lines if "a fake rank ended" in line]
    assert len(said) == 2, lines  # what happened, and the stage that was reached
    assert not any("Traceback" in line for line in lines)


def test_an_engine_lost_at_decode_costs_no_token(
    start_cluster: StartCluster, model: str, tmp_path: Path
) -> None:
    with start_cluster(model, n_decode=2) as cluster:
        events: list[dict[str, Any]] = []
        victim = ""
        for event in stream(cluster, PROMPT, 200):
            events.append(event)
            if len(events) == 50:
                victim = chosen(cluster, "decode")
                (tmp_path / f"lost.{cluster.process(victim).pid}").touch()
        assert text_of(events) == expected_text(model, 200)
        assert events[-1] == {"done": True}
        check_end(cluster, victim)


def test_an_engine_lost_at_prefill_costs_no_token(
    start_cluster: StartCluster, model: str, tmp_path: Path
) -> None:
    extra = {"prefill": ["--chunk-tokens", "32", "--max-chunk-tokens", "32"]}
    with (
        start_cluster(model, n_prefill=2, extra=extra) as cluster,
        ThreadPoolExecutor(1) as client,
    ):
        answer = client.submit(lambda: list(stream(cluster, PROMPT, 100)))
        cluster.until(lambda: bool(cluster.decisions()))
        victim = chosen(cluster, "prefill")
        (tmp_path / f"lost.{cluster.process(victim).pid}").touch()
        events = answer.result(timeout=60)
        assert text_of(events) == expected_text(model, 100)
        assert len(cluster.decisions()) == 2  # it was placed again
        check_end(cluster, victim)


def test_an_engine_lost_while_idle_is_noticed(
    start_cluster: StartCluster, model: str, tmp_path: Path
) -> None:
    with start_cluster(model, n_decode=2) as cluster:
        (tmp_path / f"lost.{cluster.process('decode-1').pid}").touch()
        check_end(cluster, "decode-1")
