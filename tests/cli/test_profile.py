"""`halfmoon profile` with the engine that has no model: a cost file that can be simulated with."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halfmoon_cli.__main__ import app
from halfmoon_cli.simulate import machine_profile
from halfmoon_simulator.costs.cost_file import load_costs

#: Each forward takes 2 ms, and 0.1 ms more per token.
ENGINE = "fake://slow?step_s=0.002&token_s=0.0001&max_context=512"


@pytest.fixture(scope="module")
def measure_once() -> Any:
    """The engine's timings: those of the first command that asks for them."""
    return cache(machine_profile.measure_engine)


@pytest.fixture(autouse=True)
def measured_once(measure_once: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_profile, "measure_engine", measure_once)


def test_a_profile_becomes_a_cost_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [
        machine_profile.Bandwidth("tcp", 1024, 1e9),
        machine_profile.Bandwidth("shm", 1024, 2e9),
    ]
    monkeypatch.setattr(machine_profile, "measure_transfers", lambda: paths)  # others measure that
    out = tmp_path / "costs.json"
    result = CliRunner().invoke(app, ["profile", "--model", ENGINE, "--out", str(out)])
    assert result.exit_code == 0, result.output
    costs = load_costs(str(out))
    # Sleeps are never too short, and on a busy machine much longer. A line through them is not
    # exact: it may pass below one of them.
    assert costs.prefill_s(512) > (0.002 + 512 * 0.0001) / 2
    assert costs.prefill_s(512) > costs.prefill_s(512, 448)
    assert costs.step_s(8, 512) > 0.002 / 2
    assert (costs.network_bytes_per_s, costs.local_bytes_per_s) == (1e9, 2e9)
    assert costs.max_context == 512
    simulated = CliRunner().invoke(
        app, ["simulate", "l-eval", "--requests", "2", "--costs", str(out)]
    )
    assert simulated.exit_code == 0, simulated.output


@pytest.mark.parametrize("limit", [0.0, 1e9])
def test_a_bad_fit_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    paths = [machine_profile.Bandwidth(name, 1024, 1e9) for name in ("tcp", "shm")]
    monkeypatch.setattr(machine_profile, "measure_transfers", lambda: paths)
    monkeypatch.setattr(machine_profile, "LARGEST_MISFIT", limit)
    out = tmp_path / "costs.json"
    result = CliRunner().invoke(app, ["profile", "--model", ENGINE, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.exists()
    assert ("the fit is bad" in result.output) == (limit == 0.0)


def test_a_warning_has_the_misfit_and_its_limit() -> None:
    misfits = {"prefill": 0.3, "decode step": 0.456}
    (warning,) = machine_profile.fit_warnings(misfits)
    assert "decode step formula misses a measurement by 46%, and 30% is the limit" in warning
    assert "run halfmoon profile again" in warning
    assert len(machine_profile.fit_warnings({"prefill": float("nan")})) == 1
