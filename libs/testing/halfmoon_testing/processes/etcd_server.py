"""Run a real etcd for tests, in a folder of its own."""

import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_sandbox.bound_process import start_bound
from halfmoon_testing.tls_authority import IssuedCertificate

_MIB = 1024 * 1024
_START_S = 60.0


class EtcdServer:
    """Run an etcd of one member, with the shortest leases; a context manager that ends it."""

    def __init__(
        self,
        max_request_bytes: int = 24 * _MIB,
        *,
        tls: IssuedCertificate | None = None,
        root_password: str = "",
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Start etcd, and wait until it answers.

        Args:
            max_request_bytes: largest request. The default allows values of the largest record;
                etcd's own default is 1.5 MiB.
            tls: certificate to serve TLS with.
            root_password: password of the user root; empty: there are no users.
            options: further flags of etcd.
        """
        self.port = free_port()
        self._scheme = "http" if tls is None else "https"
        self._address = f"{self._scheme}://127.0.0.1:{self.port}"
        self._root_password = root_password
        self._headers: dict[str, str] = {}
        peer = f"http://127.0.0.1:{free_port()}"
        self._folder = tempfile.TemporaryDirectory(prefix="halfmoon-etcd-")
        flags = {
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
            **({} if tls is None else {"cert-file": tls.cert, "key-file": tls.key}),
            **(options or {}),
        }
        self._process = start_bound(
            ["etcd", *(f"--{name}={value}" for name, value in flags.items())],
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
        if root_password:
            self.call("/auth/user/add", {"name": "root", "password": root_password})
            self.call("/auth/role/add", {"name": "root"})
            self.call("/auth/user/grant", {"user": "root", "role": "root"})
            self.call("/auth/enable", {})
            self.log_in()

    @property
    def url(self) -> str:
        """URL for `open_store`."""
        user = f"root:{quote(self._root_password, safe='')}@" if self._root_password else ""
        scheme = "etcd" if self._scheme == "http" else "etcds"
        return f"{scheme}://{user}127.0.0.1:{self.port}"

    def clear(self) -> None:
        """Remove all records."""
        self.call("/kv/deleterange", {"key": "AA==", "range_end": "AA=="})

    def call(self, path: str, request: object) -> Any:
        """Call etcd's gateway, as root if there are users, and return its JSON."""
        answer = httpx.post(
            f"{self._address}/v3{path}", json=request, headers=self._headers, verify=False
        )
        answer.raise_for_status()
        return answer.json()

    def log_in(self) -> None:
        """Get a token for `call`."""
        self._headers = {}  # with a token that has ended, etcd refuses even this call
        login = {"name": "root", "password": self._root_password}
        self._headers = {"authorization": self.call("/auth/authenticate", login)["token"]}

    def stop(self) -> None:
        """Kill etcd, and remove its folder."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def _answers(self) -> bool:
        try:
            return bool(
                httpx.get(f"{self._address}/health", verify=False).json()["health"] == "true"
            )
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
