"""`halfmoon bench` as a user runs it, against an endpoint that does not always behave."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from halfmoon_cli.__main__ import app
from halfmoon_testing.scripted_endpoint import ScriptedAnswer, ScriptedEndpoint

BUSY = ScriptedAnswer(status=429, body={"error": {"message": "busy", "code": "overloaded"}})
SMALL = ("--input-tokens", "8", "--output-tokens", "3", "--vocab", "500")
#: One request at a time, so that scripted answers meet requests in order.
ONE_BY_ONE = ("--rate", "500", "--max-in-flight", "1")


def bench(endpoint: ScriptedEndpoint, *arguments: str) -> Result:
    wanted = ["bench", "--url", endpoint.url, *SMALL, *arguments]
    return CliRunner().invoke(app, wanted, env={"COLUMNS": "200"})


def figures(path: Path) -> dict[str, Any]:
    (run,) = json.loads(path.read_text())["runs"]
    assert isinstance(run, dict)
    return run


def test_a_run_is_told_on_screen_and_in_a_file(endpoint: ScriptedEndpoint, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    # The first request is not counted.
    endpoint.scripts = [
        *(ScriptedAnswer(), ScriptedAnswer(), BUSY, ScriptedAnswer(cut_after=1), ScriptedAnswer()),
    ]
    result = bench(
        endpoint,
        *ONE_BY_ONE,
        *("--requests", "6", "--ttft-slo", "60", "--seed", "5", "--json", str(path)),
    )
    assert result.exit_code == 0, result.output
    for words in ("4 of 6 requests", "4 (66.7%)", "1 refused: 429 overloaded", "1 failed: the a"):
        assert words in result.output
    run = figures(path)
    summary = run["summary"]
    assert (summary["n_good"], summary["n_refused"], summary["n_failed"]) == (4, 1, 1)
    assert summary["n_cached_tokens"] == 16
    assert run["settings"]["seed"] == 5 and run["settings"]["salt"]
    assert run["facts"]["n_requests"] == 6


def test_no_key_is_written_anywhere(endpoint: ScriptedEndpoint, tmp_path: Path) -> None:
    endpoint.key = "secret-key"
    path = tmp_path / "run.json"
    wanted = ("--rate", "5", "--requests", "1", "--json", str(path))
    result = bench(endpoint, "--api-key", "secret-key", *wanted)
    assert result.exit_code == 0
    assert "secret-key" not in result.output + path.read_text()


def test_nothing_answered_is_a_failure_without_latencies(
    endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    endpoint.scripts = [ScriptedAnswer(), *[BUSY] * 3, ScriptedAnswer(cut_after=1), BUSY]
    result = bench(endpoint, *ONE_BY_ONE, "--requests", "4", "--json", str(path))
    assert result.exit_code == 1
    assert "no request succeeded" in result.output
    assert "3 refused: 429 overloaded" in result.output and "1 failed: the a" in result.output
    for word in ("TTFT", "TBT", "end to end", "goodput  ", "p99"):
        assert word not in result.output
    summary = figures(path)["summary"]
    assert summary["refusals"] == {"429 overloaded": 3}
    for name in ("ttft_s", "tbt_s", "tbt_tail_s", "gap_s", "e2e_s"):
        assert set(summary[name].values()) == {None}
    assert set(summary["generator"]["send_lag_s"].values()) != {None}


def test_two_runs_have_other_prompts_unless_they_have_one_salt(
    endpoint: ScriptedEndpoint,
) -> None:
    for salt in ((), (), ("--salt", "x"), ("--salt", "x")):
        bench(endpoint, "--rate", "5", "--requests", "1", *salt)
    first, second, third, fourth = (body["prompt"] for _, body in endpoint.asked[1::2])
    assert first != second and third == fourth != first


def test_token_ids_are_those_of_the_endpoints_tokenizer(endpoint: ScriptedEndpoint) -> None:
    endpoint.token_ids = [7, 300, 12]
    arguments = ["bench", "--url", endpoint.url, "--rate", "5", "--requests", "1"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    _, (path, body) = endpoint.asked
    assert path == "/v1/completions" and len(body["prompt"]) == 512
    assert set(body["prompt"]) == {7, 300, 12}


def test_an_endpoint_that_knows_no_such_field_is_met_with_a_way_out(
    endpoint: ScriptedEndpoint,
) -> None:
    endpoint.scripts = [
        ScriptedAnswer(status=400, body={"error": {"message": "unknown: ignore_eos"}})
    ]
    result = bench(endpoint, "--rate", "5")
    assert result.exit_code == 1
    assert "unknown: ignore_eos" in result.output and "--no-ignore-eos" in result.output
    assert len(endpoint.asked) == 1


def test_token_ids_of_an_unknown_vocabulary_are_not_guessed(endpoint: ScriptedEndpoint) -> None:
    arguments = ["bench", "--url", endpoint.url, "--rate", "5"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1 and "--vocab" in result.output
    assert not endpoint.asked


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--rate or --trace"),
        (("--rate", "1", "--json", "nowhere/x.json"), "no folder"),
        (("--trace", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--trace", "x", "--rate", "1"), "--speedup"),
        (("--rate", "0"), "--rate is 0"),
        (("--rate", "1", "--tbt-slo", "-1"), "--tbt-slo is -1"),
        (("--rate", "1", "--scale-lengths", "nan"), "--scale-lengths is nan"),
    ],
)
def test_what_can_not_work_is_said_before_anything_is_sent(
    endpoint: ScriptedEndpoint, arguments: tuple[str, ...], told: str
) -> None:
    result = bench(endpoint, *arguments)
    assert result.exit_code == 2
    assert told in result.output
    assert not endpoint.asked


def test_ctrl_c_ends_a_run_early_and_shows_what_there_is(
    endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    endpoint.scripts = [ScriptedAnswer(), ScriptedAnswer(), ScriptedAnswer(hold_after=1)]
    path = tmp_path / "run.json"
    wanted = (*ONE_BY_ONE, "--requests", "2", "--json", str(path), *SMALL)
    process = subprocess.Popen(
        [sys.executable, "-m", "halfmoon_cli", "bench", "--url", endpoint.url, *wanted],
        env={**os.environ, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert endpoint.holds.wait(60), process.poll()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "stopped early" in output
    assert figures(path)["summary"]["n_requests"] == 1
