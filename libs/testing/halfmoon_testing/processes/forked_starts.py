"""Start programs of tests from a process that has imported what they import: 8 s less a worker.

    start_bound([python, "-m", "halfmoon_decode", …]) ──▶ template ── fork ──▶ halfmoon_decode

A program of another interpreter, or whose environment says something that Python or a library reads
before the program runs, is started as ever.
"""

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfmoon_sandbox import bound_process
from halfmoon_sandbox.bound_process import start_bound

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
    "halfmoon_cli.__main__",
    "halfmoon_cli.up.up_command",
    "halfmoon_cli.up.foreground",
    "uvicorn.lifespan.off",
    "stringprep",
)
#: Modules that the template becomes; and any file.
PROGRAMS = frozenset(
    f"halfmoon_{name}" for name in ("conductor", "prefill", "decode", "kvstore", "cli")
)
#: Variables that are read while something is imported, by how they begin.
_READ_AT_IMPORT = ("PYTHON", "LD_", "OMP_", "GOMP_", "MKL_", "TORCH_", "HF_", "TRANSFORMERS_")
#: Of those, what the template does for a child; an engine in this process sets the last, too.
_APPLIED = frozenset({"PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "GOMP_SPINCOUNT"})
_TEMPLATE = "halfmoon_testing.processes.fork_template"
#: Of a process, as its starter has them at that moment.
INHERITED_LIMITS = (
    resource.RLIMIT_AS,
    resource.RLIMIT_CORE,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_NOFILE,
)
#: Of one request: a program's arguments and its environment.
MAX_REQUEST_BYTES = 192 * 1024
#: Standard input, output and error of the program.
N_DESCRIPTORS = 3


class ForkedProcess(subprocess.Popen[Any]):
    """A process that the template forked, with what services' owners use of `Popen`."""

    def __init__(self, channel: "ForkChannel", pid: int, args: Sequence[str]) -> None:
        self.args = list(args)
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        self._channel = channel
        self._handle = os.pidfd_open(pid)
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        with self._waiting:
            if self.returncode is None and select.select([self._handle], [], [], 0)[0]:
                self.returncode = self._channel.reap(self.pid)
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


class ForkChannel:
    """Ask a template for programs; what was started ends when the channel closes."""

    def __init__(self, control: socket.socket, environment: Mapping[str, str]) -> None:
        """Take one end of `open_channel`, and the variables with which the template imported."""
        self._control = control
        self._environment = dict(environment)
        self._asking = threading.Lock()

    def takes(self, command: Sequence[str | os.PathLike[str]], options: Mapping[str, Any]) -> bool:
        """Return whether a fork is what this command and these options of `Popen` would be."""
        interpreter, *program = [os.fspath(word) for word in command]
        if interpreter != sys.executable or not program or options.get("text"):
            return False
        is_module = program[0] == "-m" and len(program) > 1
        if not (program[1] in PROGRAMS if is_module else program[0].endswith(".py")):
            return False
        if subprocess.PIPE in options.values() or not hasattr(options.get("stdout"), "fileno"):
            return False
        env = options.get("env") or os.environ
        names = {*env, *self._environment} - _APPLIED
        return all(
            env.get(name) == self._environment.get(name)
            for name in names
            if name.startswith(_READ_AT_IMPORT)
        )

    def fork(
        self, command: Sequence[str | os.PathLike[str]], options: Mapping[str, Any]
    ) -> ForkedProcess | None:
        """Start a program if a fork is what it would be; see `bound_process.fork`.

        Raises:
            RuntimeError: the template has ended.
        """
        return self.start(command, **options) if self.takes(command, options) else None

    def start(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        stdout: Any,
        stdin: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        start_new_session: bool = False,
    ) -> ForkedProcess:
        """Start a program that the template takes; arguments are those of `subprocess.Popen`.

        Raises:
            RuntimeError: the template has ended.
        """
        words = [os.fspath(word) for word in command]
        request = {
            "program": words[1:],
            "env": dict(os.environ if env is None else env),
            "cwd": os.fspath(cwd or Path.cwd()),
            "start_new_session": start_new_session,
            "limits": {limit: resource.getrlimit(limit) for limit in INHERITED_LIMITS},
        }
        with Path(os.devnull).open("rb") as null:
            out = stdout.fileno()
            others = {None: 2, subprocess.STDOUT: out, subprocess.DEVNULL: null.fileno()}
            errors = others[stderr] if stderr in others else stderr.fileno()
            source = stdin.fileno() if hasattr(stdin, "fileno") else null.fileno()
            return ForkedProcess(self, self._ask(request, [source, out, errors]), words)

    def reap(self, pid: int) -> int:
        """Return the exit status of a child that has ended; negative after a signal."""
        return self._ask({"reap": pid})

    def close(self) -> None:
        """End what was started."""
        self._control.close()

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> int:
        with self._asking:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            answer = self._control.recv(64)
        if not answer:
            raise RuntimeError("the process that forks programs has ended; its output says why")
        return int(json.loads(answer))


class ForkTemplate:
    """The process that forks, and the channel to it; it starts with the first program."""

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        """Take the modules that it imports."""
        self._preloaded = preloaded
        self._process: subprocess.Popen[Any] | None = None
        self._opening = threading.Lock()
        self._theirs: socket.socket
        control, self._theirs = open_channel()
        self._channel = ForkChannel(control, os.environ)

    def fork(
        self, command: Sequence[str | os.PathLike[str]], options: Mapping[str, Any]
    ) -> ForkedProcess | None:
        """Start a program if a fork is what it would be; see `bound_process.fork`.

        Raises:
            RuntimeError: the template has ended.
        """
        if not self._channel.takes(command, options):
            return None
        with self._opening:
            if self._process is None:
                self._open()
        return self._channel.start(command, **options)

    def close(self) -> None:
        """End it, and all that it forked."""
        self._channel.close()
        self._theirs.close()
        if self._process is not None:
            self._process.wait()

    def _open(self) -> None:
        descriptor = self._theirs.fileno()
        self._process = start_bound(
            [sys.executable, "-u", "-m", _TEMPLATE, str(descriptor), *self._preloaded],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            # A thread that an import starts would be missing in forks.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        self._theirs.close()


def open_channel() -> tuple[socket.socket, socket.socket]:
    """Open both ends of a channel."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST_BYTES)
    return ends


@contextmanager
def unforked() -> Iterator[None]:
    """Start programs as users do, by an interpreter for each, in this block."""
    before, bound_process.fork = bound_process.fork, None
    try:
        yield
    finally:
        bound_process.fork = before
