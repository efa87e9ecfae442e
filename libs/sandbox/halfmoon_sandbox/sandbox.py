"""Start a template process, fork children from it, and end it."""

import itertools
import select
import signal
import socket
import subprocess
import sys
import threading
from typing import Self

from halfmoon_sandbox import control_protocol, frames
from halfmoon_sandbox.child import FAULTS, Child
from halfmoon_sandbox.errors import ChildUnavailable, LoadFailed

MIB = 1024 * 1024
#: Seconds within which a template must load its handler.
_START_S = 120.0
#: Seconds within which a template must fork a child.
_FORK_S = 30.0
#: Seconds in which a template whose socket is closed ends.
_END_S = 5.0


class Sandbox:
    """One template process, started when it is first needed and again when it has died.

    Thread-safe. Close it: its children end with it.

    Args:
        factory: ``module:function`` that makes the handler (`bytes -> bytes`) of `argument`, in
            the template process.
        argument: for the factory.
        memory_bytes: address space that a child may use beyond the template's.
        niceness: by how much a child yields the processor to its owner (see nice(2)).
        load_cpu_s: processor seconds in which the factory makes the handler.
    """

    def __init__(
        self,
        factory: str,
        argument: bytes = b"",
        *,
        memory_bytes: int = 512 * MIB,
        niceness: int = 5,
        load_cpu_s: float = 30.0,
    ) -> None:
        self._command = (factory, str(memory_bytes), str(niceness), str(load_cpu_s))
        self._load_cpu_s = load_cpu_s
        self._argument = argument
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False
        #: Reason for which the handler can't be made, once and for all.
        self._broken: LoadFailed | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the template; None while it does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the template, unless it runs. Does not wait.

        Raises:
            ChildUnavailable: it can't load its handler, or this sandbox was closed.
        """
        with self._lock:
            self._link()

    def started(self) -> bool:
        """Start the template, and return whether it has loaded its handler. Does not wait.

        Raises:
            ChildUnavailable: it can't, or this sandbox was closed.
        """
        with self._lock:
            link = self._link()
            if not self._ready and select.select([link], [], [], 0)[0]:
                self._ready_link()
            return self._ready

    def wait_ready(self) -> None:
        """Start the template and wait until it has loaded its handler.

        Raises:
            ChildUnavailable: it can't; the text says why.
        """
        with self._lock:
            self._ready_link()

    def fork(self) -> Child:
        """Fork a child. Waits for the template to load, not for the fork.

        Raises:
            ChildUnavailable: the template does not start, or this sandbox was closed.
        """
        ours, theirs = socket.socketpair()
        try:
            with self._lock, theirs:
                number = self._fork(theirs.fileno())
        except BaseException:
            ours.close()
            raise
        return Child(self, ours, number)

    def pid_of(self, number: int) -> int:
        """Return a child's process id; 0 when it has ended."""
        with self._lock:
            return self._ask(control_protocol.PID, number) or 0

    def exit_status(self, number: int) -> int | None:
        """Reap a child whose end of the socket is closed; None when its template has gone too."""
        with self._lock:
            return self._ask(control_protocol.WAIT, number)

    def kill(self, number: int) -> None:
        """End a child. Does not wait."""
        with self._lock:
            if self._control is not None and self._ready:
                try:
                    self._control.sendall(
                        control_protocol.COMMAND_FORMAT.pack(control_protocol.KILL, number)
                    )
                except OSError:
                    self._discard()

    def close(self) -> None:
        """End the template and all its children."""
        with self._lock:
            self._closed = True
            self._discard()

    # -- under the lock ----------------------------------------------------------------------

    def _fork(self, descriptor: int) -> int:
        number = next(self._numbers)
        order = control_protocol.COMMAND_FORMAT.pack(control_protocol.FORK, number)
        for attempt in (1, 2):  # a template that was killed is started once more
            link = self._ready_link()
            try:
                socket.send_fds(link, [order], [descriptor])
            except OSError as error:
                self._discard()
                if attempt == 2:
                    raise ChildUnavailable(f"the template process can't fork: {error}") from error
            else:
                return number
        raise AssertionError("unreachable")

    def _ask(self, verb: bytes, number: int) -> int | None:
        if self._control is None or not self._ready:
            return None
        try:
            self._control.sendall(control_protocol.COMMAND_FORMAT.pack(verb, number))
            reply = frames.receive_exactly(self._control, control_protocol.ANSWER_FORMAT.size)
        except OSError:
            reply = None
        if reply is None:
            self._discard()
            return None
        answer: int = control_protocol.ANSWER_FORMAT.unpack(reply)[0]
        return answer

    def _link(self) -> socket.socket:
        """Return the control socket of a running template, which may still load."""
        if self._closed:
            raise ChildUnavailable("the sandbox is closed")
        if self._broken is not None:
            raise self._broken
        if self._control is None:
            self._start()
        assert self._control is not None
        return self._control

    def _ready_link(self) -> socket.socket:
        """Return the control socket of a template that has loaded."""
        link = self._link()
        if self._ready:
            return link
        try:
            reply = frames.receive_frame(link)
        except OSError as error:
            self._discard()
            raise ChildUnavailable(f"the template process does not start: {error}") from error
        if reply is None or not reply.startswith(control_protocol.READY):
            if reply is None:
                self._broken = self._limit_passed()
            else:
                self._broken = LoadFailed(reply[1:].decode("utf-8", "replace"))
            self._discard()
            raise self._broken or ChildUnavailable("the template process does not start: it ended")
        link.settimeout(_FORK_S)
        self._ready = True
        return link

    def _limit_passed(self) -> LoadFailed | None:
        """Return the limit that a template passed while it loaded; None: it was ended otherwise."""
        assert self._process is not None
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return None
        if status == -signal.SIGPROF:
            taken = f"it took over {self._load_cpu_s:g} s of processor time"
            return LoadFailed(taken, "time")
        if status == -signal.SIGABRT:
            return LoadFailed("it took more memory than it may, or failed a check", "memory")
        if -status in FAULTS:
            return LoadFailed(f"it crashed (signal {-status})", "crash")
        return None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "halfmoon_sandbox.template_process",
                    str(theirs.fileno()),
                    *self._command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._control, self._ready = ours, False
        try:
            ours.settimeout(_START_S)
            ours.sendall(frames.encode_frame(self._argument))
        except OSError:
            pass  # it has died already: reading its answer says so

    def _discard(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._ready = False
