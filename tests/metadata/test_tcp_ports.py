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


def test_a_chosen_port_is_none_that_the_system_gives_to_connections_and_chosen_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    range_of(monkeypatch, tmp_path, "20500\t60999\n")
    assert all(20_000 <= free_port() < 20_500 for _ in range(100))
    range_of(monkeypatch, tmp_path, "32768\t60999\n")
    assert len({free_port() for _ in range(500)}) == 500


def test_a_taken_port_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        assert not is_free(port)
        monkeypatch.setattr(tcp_ports, "_LOWEST", port)
        monkeypatch.setattr(tcp_ports, "_given", set())
        range_of(monkeypatch, tmp_path, f"{port + 1}\t60999\n")
        assert free_port() != port
    assert is_free(port)
    assert free_port() == port


def test_a_range_that_is_all_or_can_not_be_read_still_gives_a_port(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for text in ("1024\t65535\n", "20000\t65535\n"):  # the system is asked for one
        range_of(monkeypatch, tmp_path, text)
        assert is_free(free_port())
    for text in ("", "?\n"):  # it is taken for the usual one
        range_of(monkeypatch, tmp_path, text)
        assert free_port() < tcp_ports._USUAL_BEGIN
