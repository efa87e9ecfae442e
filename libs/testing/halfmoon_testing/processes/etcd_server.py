"""Run a real etcd for tests, in a folder of its own."""

import os
import platform
import shutil
import subprocess
import tempfile
import time
from types import TracebackType

import httpx

from halfmoon_metadata.tcp_ports import free_port

_MIB = 1024 * 1024
_START_S = 60.0


class EtcdServer:
    """Run an etcd of one member, with the shortest leases; a context manager that ends it."""

    def __init__(self, max_request_bytes: int = 24 * _MIB) -> None:
        """Start etcd, and wait until it answers.

        Args:
            max_request_bytes: largest request. The default allows values of the largest record;
                etcd's own default is 1.5 MiB.
        """
        self.port = free_port()
        self._address = f"http://127.0.0.1:{self.port}"
        peer = f"http://127.0.0.1:{free_port()}"
        self._folder = tempfile.TemporaryDirectory(prefix="halfmoon-etcd-")
        options = {
            "data-dir": self._folder.name,
            "listen-client-urls": self._address,
            "advertise-client-urls": self._address,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            # The shortest lease follows from these.
            "heartbeat-interval": 50,
            "election-timeout": 500,
            "max-request-bytes": max_request_bytes,
        }
        self._process = subprocess.Popen(
            ["etcd", *(f"--{name}={value}" for name, value in options.items())],
            # On processors that etcd does not support, it starts only with this variable.
            env={**os.environ, "ETCD_UNSUPPORTED_ARCH": platform.machine()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"etcd at {self._address} ended, or did not start")
            time.sleep(0.02)

    @staticmethod
    def is_installed() -> bool:
        """Return whether etcd is installed (Debian: etcd-server)."""
        return shutil.which("etcd") is not None

    @property
    def url(self) -> str:
        """URL for `open_store`."""
        return f"etcd://127.0.0.1:{self.port}"

    def clear(self) -> None:
        """Remove all records."""
        everything = {"key": "AA==", "range_end": "AA=="}
        httpx.post(f"{self._address}/v3/kv/deleterange", json=everything).raise_for_status()

    def stop(self) -> None:
        """Kill etcd, and remove its folder."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def _answers(self) -> bool:
        try:
            return bool(httpx.get(f"{self._address}/health").json()["health"] == "true")
        except (httpx.HTTPError, ValueError):
            return False

    def __enter__(self) -> "EtcdServer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
