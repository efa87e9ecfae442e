"""Run a Redis that keeps its records on disk, and that can be killed, emptied or paused."""

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_sandbox.bound_process import start_bound

_STARTS_WITHIN_S = 20.0


class RedisProcess:
    """A Redis server at one port, across its restarts."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it listens.

        Raises:
            RuntimeError: it does not within its time.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        keeps = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")
        where = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder))
        with (self._folder.parent / "redis.log").open("ab") as log:
            self._process = start_bound(
                ["redis-server", *where, *keeps],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours to pass on
            )
        deadline_s = time.monotonic() + _STARTS_WITHIN_S
        while not self._listens():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"redis-server does not listen on port {self.port}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the server; its records stay on disk."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def empty(self) -> None:
        """Remove the records of a killed server."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def pause(self) -> None:
        """Let the server stand still."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the server go on."""
        self._signal(signal.SIGCONT)

    def limit_memory(self, is_full: bool) -> None:
        """Let the server take nothing new, as ``noeviction`` does with a full memory, or go on."""
        with redis.Redis(port=self.port, socket_timeout=_STARTS_WITHIN_S) as client:
            client.config_set("maxmemory", 1 if is_full else 0)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True
