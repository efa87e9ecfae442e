"""A conductor's process that can't begin."""

import socket
import subprocess
import sys

from halfmoon_metadata.tcp_ports import free_port


def test_a_port_that_is_taken_is_named_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--metadata", "embedded", "--model", "fake://tiny", "--http-port", port]
        ended = subprocess.run(
            [sys.executable, "-m", "halfmoon_conductor", *flags, "--metrics-port", "-1"],
            capture_output=True,
            text=True,
            check=False,
        )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1
    assert f"http_port {port} on 127.0.0.1" in output and "--http-port" in output
    assert "loading" not in output
    assert "never awaited" not in output
