"""Ports: which are chosen before anyone listens on them, and what listens on one."""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon_metadata import tcp_ports
from halfmoon_metadata.port_holder import PortHolder, find_holder, port_refusal
from halfmoon_metadata.tcp_ports import free_port, is_free

# -- chosen ports ---------------------------------------------------------------------------------


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


# -- holders --------------------------------------------------------------------------------------


PORT = 8000
HEAD = "sl local_address rem_address st tx_queue tr tm->when retrnsmt uid timeout inode\n"
UP = "python\0-m\0halfmoon_cli\0up\0"
CONDUCTOR = "python\0-m\0halfmoon_conductor\0--http-port\x008000\0"


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as made:
        made.bind((request.param, 0))
        made.listen()
        yield made


def test_a_port_without_a_listener_has_no_holder(listener: socket.socket) -> None:
    assert find_holder(free_port()) is None
    with socket.create_connection(listener.getsockname()[:2]) as ours:
        assert find_holder(ours.getsockname()[1]) is None


def kernel(root: Path, processes: dict[int, tuple[int, str]], holder: int) -> Path:
    """A kernel's view of processes with parents and command lines; one holds the port."""
    row = "0: 0100007F:1F40 00000000:0000 0A 0:0 0:0 0 1000 0 4711 1\n"
    (root / "net").mkdir()
    (root / "net/tcp").write_text(HEAD + "0: broken\n" + row)
    for pid, (parent, command) in processes.items():
        (root / f"{pid}/fd").mkdir(parents=True)
        (root / f"{pid}/cmdline").write_text(command)
        (root / f"{pid}/stat").write_text(f"{pid} (a) b) S {parent} 1 1")
        (root / f"{pid}/fd/0").symlink_to("/dev/null")
        (root / f"{pid}/fd/3").symlink_to("socket:[4711]" if pid == holder else "socket:[1]")
    return root


def found(root: Path) -> PortHolder:
    holder = find_holder(PORT, root)
    assert holder is not None
    return holder


def test_a_service_of_halfmoon_up_is_stopped_by_stopping_up(tmp_path: Path) -> None:
    holder = found(kernel(tmp_path, {7: (1, UP), 9: (7, CONDUCTOR)}, 9))
    assert (holder.pid, holder.halfmoon_pid) == (9, 7)
    assert "process 9 (python -m halfmoon_conductor" in str(holder)
    assert holder.way_out.endswith("`kill 7`")


def test_a_service_beside_this_one_is_not_to_be_stopped(tmp_path: Path) -> None:
    ours = os.getppid()
    holder = found(kernel(tmp_path, {ours: (1, UP), 9: (ours, CONDUCTOR)}, 9))
    assert str(holder).endswith("of the same Halfmoon")
    assert holder.way_out == "give each service a port of its own"


@pytest.mark.parametrize("parent", [1, 7])
def test_a_service_without_halfmoon_up_is_stopped_itself(tmp_path: Path, parent: int) -> None:
    root = kernel(tmp_path, {7: (1, "bash\0"), 9: (parent, CONDUCTOR)}, 9)
    assert found(root).halfmoon_pid == 9
    assert str(PortHolder(3, "nginx")) == "process 3 (nginx)", "that is no service of ours"


def test_a_command_line_controls_no_terminal_and_fills_no_screen(tmp_path: Path) -> None:
    holder = found(kernel(tmp_path, {9: (1, f"evil\0\x1b[2J\n{'x' * 5000}")}, 9))
    assert holder.command.isprintable() and len(holder.command) == 120


def test_a_holder_of_another_user_stays_unnamed(tmp_path: Path) -> None:
    root = kernel(tmp_path, {9: (1, CONDUCTOR)}, 9)
    (root / "9/fd/3").unlink()
    assert find_holder(PORT, root) is None
    assert find_holder(PORT, tmp_path / "no kernel") is None


def test_a_service_s_refusal_names_setting_holder_and_ways_out(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    text = port_refusal("http_port", port, "::", OSError(errno.EADDRINUSE, "in use"))
    assert text.startswith(
        f"http_port {port} on :: can't be had (in use by process {os.getpid()} ("
    )
    assert text.endswith("stop that process, or choose another with --http-port")
    denied = port_refusal("http_port", 80, "::", OSError(errno.EACCES, "denied"))
    assert denied.endswith("(denied): stop what has it, or choose another with --http-port")
