"""Ports that are chosen before anyone listens on them."""

import socket
from pathlib import Path

import pytest

from halfmoon_metadata import tcp_ports
from halfmoon_metadata.tcp_ports import free_port, is_free


def range_of(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Have Linux say that it gives out these, and no port be taken before the test."""
    monkeypatch.setattr(tcp_ports, "_given", set())
    (folder / "range").write_text(text)
    monkeypatch.setattr(tcp_ports, "_RANGE", folder / "range")


def test_the_range_is_the_systems() -> None:
    with socket.create_server(("127.0.0.1", 0)) as given:
        assert tcp_ports._begin_of_range() <= given.getsockname()[1]


def test_a_chosen_port_is_none_that_the_system_gives_to_connections(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    range_of(monkeypatch, tmp_path, "20500\t60999\n")
    assert all(20_000 <= free_port() < 20_500 for _ in range(100))


def test_no_port_is_chosen_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    range_of(monkeypatch, tmp_path, "32768\t60999\n")
    chosen = [free_port() for _ in range(500)]
    assert len(set(chosen)) == 500


def test_a_port_that_is_taken_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        assert not is_free(port)
        monkeypatch.setattr(tcp_ports, "_LOWEST", port)
        monkeypatch.setattr(tcp_ports, "_given", set())
        range_of(monkeypatch, tmp_path, f"{port + 1}\t60999\n")
        assert free_port() != port
    assert is_free(port)
    assert free_port() == port


@pytest.mark.parametrize("text", ["1024\t65535\n", "20000\t65535\n"])
def test_where_the_system_gives_out_all_of_them_it_is_asked_for_one(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    range_of(monkeypatch, tmp_path, text)
    assert is_free(free_port())


@pytest.mark.parametrize("text", ["", "?\n"])
def test_a_range_that_cannot_be_read_is_taken_for_the_usual_one(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    range_of(monkeypatch, tmp_path, text)
    assert free_port() < tcp_ports._USUAL_BEGIN
