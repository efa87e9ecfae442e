"""Start services of tests from a process that has imported what they import: 8 s less for each.

    start_bound([python, "-m", "halfmoon_decode", …]) ──▶ template ── fork ──▶ halfmoon_decode

A program of another interpreter, or whose environment says something that Python or a library reads
before the program runs, is started as ever.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfmoon_sandbox.bound_process import start_bound
from halfmoon_testing.processes.fork_template import MAX_REQUEST_BYTES

#: What takes long to import, in the services' own order.
PRELOADED = (
    "halfmoon_kvstore.app",
    "halfmoon_conductor.app",
    "halfmoon_prefill.app",
    "halfmoon_decode.app",
    "halfmoon_workers.roles.worker_process",
    "halfmoon_engine.checkpoints.torch_loader",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.tokenization_auto",
    "transformers.convert_slow_tokenizer",
    "halfmoon_metadata.stores.http_store",
    "halfmoon_transfer.backends.peer_credentials",
    "halfmoon_transfer.backends.shm.shm_backend",
    "halfmoon_transfer.backends.tcp.tcp_backend",
    "uvicorn.lifespan.off",
    "stringprep",
)
#: Modules that the template becomes.
SERVICES = frozenset(f"halfmoon_{role}" for role in ("conductor", "prefill", "decode", "kvstore"))
#: Variables that are read while something is imported, by how they begin.
_READ_AT_IMPORT = ("PYTHON", "LD_", "OMP_", "GOMP_", "MKL_", "TORCH_", "HF_", "TRANSFORMERS_")
#: Of those, what the template does for a child.
_APPLIED = frozenset({"PYTHONFAULTHANDLER", "PYTHONUNBUFFERED"})
_TEMPLATE = "halfmoon_testing.processes.fork_template"


class ForkedStarts:
    """Start commands as `start_bound` does, services from a template that starts with the first."""

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        self._preloaded = preloaded
        self._template: ForkTemplate | None = None
        self._opening = threading.Lock()

    def start(self, command: Sequence[str | os.PathLike[str]], **options: Any) -> Any:
        """Start a command; arguments and errors are those of `start_bound`."""
        if not is_service(command):
            return start_bound(command, **options)
        with self._opening:
            self._template = self._template or ForkTemplate(self._preloaded)
        if self._template.takes(options.get("env") or os.environ):
            return self._template.start(command, **options)
        return start_bound(command, **options)

    def close(self) -> None:
        """End the template, and the services that it forked."""
        if self._template is not None:
            self._template.close()
            self._template = None


def is_service(command: Sequence[str | os.PathLike[str]]) -> bool:
    """Return whether a command runs a service by this interpreter."""
    interpreter, *program = [os.fspath(word) for word in command]
    if interpreter != sys.executable or not program:
        return False
    is_module = program[0] == "-m" and len(program) > 1
    return program[1] in SERVICES if is_module else program[0].endswith(".py")


class ForkedProcess(subprocess.Popen[Any]):
    """A process that the template forked, with what services' owners use of `Popen`."""

    def __init__(self, template: "ForkTemplate", pid: int, args: Sequence[str]) -> None:
        self.args = list(args)
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        self._template = template
        self._handle = os.pidfd_open(pid)
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        with self._waiting:
            if self.returncode is None and select.select([self._handle], [], [], 0)[0]:
                self.returncode = self._template.reap(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its status.

        Raises:
            subprocess.TimeoutExpired: it did not end in time.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not select.select([self._handle], [], [], left_s)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal; nothing happens once the process has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, sig)

    def __exit__(self, *_: object) -> None:
        self.wait()

    def __del__(self, *_: object) -> None:
        os.close(self._handle)


class ForkTemplate:
    """The process that forks services; it ends with this one."""

    def __init__(self, preloaded: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST_BYTES)
        self._asking = threading.Lock()
        self._environment = dict(os.environ)
        with theirs:
            self._process = start_bound(
                [sys.executable, "-u", "-m", _TEMPLATE, str(theirs.fileno()), *preloaded],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def takes(self, env: Mapping[str, str]) -> bool:
        """Return whether a fork has what an interpreter would read from this environment."""
        names = {*env, *self._environment} - _APPLIED
        return all(
            env.get(name) == self._environment.get(name)
            for name in names
            if name.startswith(_READ_AT_IMPORT)
        )

    def start(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        stdout: Any,
        stdin: Any = subprocess.DEVNULL,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        start_new_session: bool = False,
    ) -> ForkedProcess:
        """Start a service; arguments are those of `subprocess.Popen`.

        Raises:
            RuntimeError: the template has ended.
        """
        words = [os.fspath(word) for word in command]
        request = {
            "program": words[1:],
            "env": dict(os.environ if env is None else env),
            "cwd": os.fspath(cwd or Path.cwd()),
            "start_new_session": start_new_session,
        }
        with Path(os.devnull).open("rb") as null:
            out = stdout.fileno()
            errors = out if stderr == subprocess.STDOUT else 2
            source = null.fileno() if stdin == subprocess.DEVNULL else stdin.fileno()
            return ForkedProcess(self, self._ask(request, [source, out, errors]), words)

    def reap(self, pid: int) -> int:
        """Return the exit status of a child that has ended; negative after a signal."""
        return self._ask({"reap": pid})

    def close(self) -> None:
        """End the template, and its children."""
        self._control.close()
        self._process.wait()

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> int:
        with self._asking:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            answer = self._control.recv(64)
        if not answer:
            raise RuntimeError("the process that forks services has ended; its output says why")
        return int(json.loads(answer))
