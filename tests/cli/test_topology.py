"""`halfmoon transfer topology` prints what it found, or what it was given."""

import json
from pathlib import Path

from typer.testing import CliRunner

from halfmoon_cli.__main__ import app

MATRIX = '{"cpu:0":[["card_a"],["card_b"]]}'


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["transfer", "topology", *arguments])
    return result.exit_code, result.output


def test_this_machine_s_matrix_is_printed_and_can_be_read_again(tmp_path: Path) -> None:
    code, text = run("--json")
    assert code == 0
    assert "*" in json.loads(text)
    file = tmp_path / "matrix.json"
    file.write_text(text)
    assert run("--json", "--matrix", str(file)) == (0, text)


def test_a_table_of_cards_and_memory_is_printed() -> None:
    code, text = run()
    assert code == 0
    assert "NUMA node" in text
    assert "preferred" in text


def test_a_given_matrix_takes_the_place_of_what_is_found(tmp_path: Path) -> None:
    file = tmp_path / "matrix.json"
    file.write_text(MATRIX)
    assert json.loads(run("--json", "--matrix", str(file))[1]) == json.loads(MATRIX)
    code, text = run("--matrix", str(file))
    assert code == 0
    assert "card_a is in the matrix, and this machine has no such card" in text


def test_a_matrix_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "matrix.json"
    file.write_text("[]")
    code, text = run("--matrix", str(file))
    assert code == 2
    assert "can't be used: not a NIC priority matrix" in " ".join(text.split())
    assert run("--matrix", str(tmp_path / "none"))[0] == 2
