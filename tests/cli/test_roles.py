"""`halfmoon roles`: the roles of workers, as a terminal shows them."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from halfmoon_cli.__main__ import app
from halfmoon_testing.scripted_endpoint import ScriptedEndpoint

ROLES: dict[str, Any] = {
    "now_s": 5.0,
    "automatic": True,
    "pools": {
        "prefill": {"load": 1.5, "n_workers": 1},
        "decode": {"load": 0.25, "n_workers": 2},
    },
    "next": {"worker_id": "decode-0", "to": "prefill", "due_s": 12.0},
    "rest_s": 0.0,
    "reason": "prefill has had a load of 1.50",
    "workers": [
        {"worker_id": "decode-0", "role": "decode", "roles": ["prefill", "decode"], "load": 0.25},
        {
            "worker_id": "decode-1",
            "role": "decode",
            "roles": ["prefill", "decode"],
            "pinned": "prefill",
            "changing_to": "prefill",
            "n_asked": 3,
        },
        {
            "worker_id": "decode-2",
            "role": None,
            "pinned": "prefill",
            "changing_to": "prefill",
            "has_begun": True,
            "n_asked": 1,
        },
        {"worker_id": "prefill-0", "role": "prefill", "roles": ["prefill"], "load": 1.5},
    ],
}


@pytest.fixture
def conductor(endpoint: ScriptedEndpoint) -> ScriptedEndpoint:
    endpoint.pages["/debug/roles"] = ROLES
    return endpoint


def roles(conductor: ScriptedEndpoint, *arguments: str) -> Result:
    wanted = ["roles", "--url", conductor.url, *arguments]
    return CliRunner().invoke(app, wanted, env={"COLUMNS": "200"})


def row(output: str, first: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if line.startswith(first)]
    return line.split()


def test_each_worker_is_shown_with_role_pin_load_and_change(conductor: ScriptedEndpoint) -> None:
    result = roles(conductor)
    assert result.exit_code == 0, result.output
    out = result.output
    assert row(out, "decode-0 ") == ["decode-0", "decode", "prefill,", "decode", "–", "0.25"]
    assert row(out, "prefill-0 ") == ["prefill-0", "prefill", "prefill", "–", "1.50"]
    assert row(out, "decode-1 ")[4:6] == ["prefill", "–"]
    assert "to prefill: asked 3 times, its log says why it refuses" in out
    assert row(out, "decode-2 ")[1] == "away" and "to prefill: it starts again" in out


def test_the_loads_and_the_next_change_are_shown_below(conductor: ScriptedEndpoint) -> None:
    out = roles(conductor).output
    assert "prefill: load 1.50, workers: 1 · decode: load 0.25, workers: 2" in out
    assert "next: decode-0 to prefill in 12 s, if the loads stay: prefill has had" in out


def test_that_nothing_changes_is_shown_with_the_reason(conductor: ScriptedEndpoint) -> None:
    conductor.pages["/debug/roles"] = ROLES | {"next": None, "rest_s": 49.0, "reason": "at rest"}
    assert "next: no change (none for 49 s: one was made): at rest" in roles(conductor).output


def test_programs_get_the_roles_as_the_conductor_says_them(conductor: ScriptedEndpoint) -> None:
    assert json.loads(roles(conductor, "--json").stdout) == ROLES


def test_names_from_the_wire_do_not_command_the_terminal(conductor: ScriptedEndpoint) -> None:
    worker = {"worker_id": "\x1b[2J[red]x", "role": "decode"}
    conductor.pages["/debug/roles"] = ROLES | {"workers": [worker]}
    out = roles(conductor).output
    assert "\x1b" not in out and "[red]x" in out


@pytest.mark.parametrize("pages", [{}, {"/debug/roles": {"data": []}}])
def test_an_endpoint_without_roles_is_refused_with_a_way_out(
    endpoint: ScriptedEndpoint, pages: dict[str, Any]
) -> None:
    endpoint.pages |= pages
    result = roles(endpoint)
    assert result.exit_code == 1
    assert "no /debug/roles" in result.stderr and "--url" in result.stderr


def test_a_role_that_does_not_exist_is_refused_before_anything_is_sent(
    conductor: ScriptedEndpoint,
) -> None:
    result = roles(conductor, "set", "decode-0", "kvstore")
    assert result.exit_code == 2
    assert "prefill" in result.stderr and "auto" in result.stderr


def test_a_key_is_sent_wherever_it_stands(conductor: ScriptedEndpoint) -> None:
    conductor.key = "secret"
    assert "--api-key" in roles(conductor).stderr
    assert roles(conductor, "--api-key", "secret").exit_code == 0
    # The scripted endpoint knows no such POST: with the key it says so, without it asks for one.
    for arguments in (
        ("--api-key", "secret", "set", "decode-0", "auto"),
        ("set", "decode-0", "auto", "--api-key", "secret"),
    ):
        assert "no /debug/roles" in roles(conductor, *arguments).stderr
    assert "--api-key" in roles(conductor, "set", "decode-0", "auto").stderr
