"""The scripts in `examples/`: short, and running as a reader would run them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfmoon_testing.scripted_endpoint import ScriptedAnswer, ScriptedEndpoint

FOLDER = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def run(script: str, *arguments: object, cwd: Path, **environment: str) -> str:
    """What an example prints."""
    ran = subprocess.run(
        [sys.executable, FOLDER / script, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_has_at_most_forty_lines_and_is_in_the_readme(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 40
    assert f"examples/{path.name}" in (FOLDER.parent / "README.md").read_text()


def test_bytes_are_moved_between_two_processes(tmp_path: Path) -> None:
    printed = run("move_bytes.py", cwd=tmp_path)
    assert "read back hello over shm" in printed
    assert "the owner has hello" in printed


def test_a_trace_is_simulated_and_plotted(tmp_path: Path) -> None:
    # As it stands, but for its size.
    program = (FOLDER / "simulate_trace.py").read_text()
    assert "n_requests=1000" in program
    script = tmp_path / "smaller.py"
    script.write_text(program.replace("n_requests=1000", "n_requests=100"))
    printed = run(str(script), tmp_path / "plots", cwd=tmp_path)
    assert "load_balance: TTFT p90" in printed and "kvcache_centric: TTFT p90" in printed
    assert (tmp_path / "plots" / "ttft.png").stat().st_size > 0


def test_a_placement_policy_of_ones_own_runs_in_the_simulator(tmp_path: Path) -> None:
    printed = run("placement_policy.py", cwd=tmp_path)
    assert "min_ttft: TTFT p90" in printed and "longest_prefix: TTFT p90" in printed


def test_a_notebook_studies_placement_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    notebook = json.loads((FOLDER / "study_placement.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    # As it stands, but for its size.
    program = "\n".join(cells).replace("N_REQUESTS = 500", "N_REQUESTS = 60")
    program = program.replace("(1.0, 2.0, 3.0)", "(1.0,)")
    script = tmp_path / "cells.py"
    body = program.replace("\n", "\n    ")
    script.write_text(f"if __name__ == '__main__':\n    {body}\n")
    printed = run(str(script), cwd=tmp_path, MPLBACKEND="agg")
    assert "60 of 60 requests" in printed
    assert "longest_prefix   TTFT p90" in printed
    shown = [c["outputs"] for c in notebook["cells"] if c["cell_type"] == "code"]
    assert sum("image/png" in out.get("data", {}) for outs in shown for out in outs) == 2


def test_a_client_of_the_rest_api_streams_an_answer(tmp_path: Path) -> None:
    with ScriptedEndpoint() as endpoint:
        printed = run("chat_client.py", "how many?", cwd=tmp_path, HALFMOON_URL=endpoint.url)
        assert printed == "one two three\n10 prompt tokens\n"
        ((path, body),) = endpoint.asked
        assert path == "/v1/chat/completions"
        assert body["messages"] == [{"role": "user", "content": "how many?"}]


def test_a_client_is_told_when_to_come_back(tmp_path: Path) -> None:
    busy = ScriptedAnswer(status=429, headers={"Retry-After": "7"}, body={"error": {}})
    with ScriptedEndpoint() as endpoint:
        endpoint.scripts = [busy]
        ran = subprocess.run(
            [sys.executable, FOLDER / "chat_client.py"],
            env={**os.environ, "HALFMOON_URL": endpoint.url},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ran.returncode == 1
    assert "try again in 7 s" in ran.stderr
