"""A real Redis that is killed, frozen and started again on one port."""

import signal
import socket
import subprocess
import time
from pathlib import Path

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_sandbox.bound_process import start_bound
from tests.installed_programs import skip_without


class RedisServer:
    """A metadata server without persistence, on one port for all of its starts."""

    def __init__(self, folder: Path) -> None:
        skip_without("redis-server")
        self._folder, self._port = folder, free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self.start()

    def start(self) -> None:
        """Start it, empty."""
        where = ["--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        self._process = start_bound(
            ["redis-server", *where, "--save", ""], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "redis-server does not listen"
                time.sleep(0.02)

    def freeze(self) -> None:
        """Let it keep its connections, and answer nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait(20)
