"""Send requests to one child process, and receive answers or the reason for none.

`begin` and `poll` are for an owner that has other work meanwhile; `call` and `call_async` wait.
A child serves one request at a time.
"""

import asyncio
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn, Protocol, Self

from halfmoon_sandbox import frames
from halfmoon_sandbox.control_protocol import NO_CHILD, OUT_OF_MEMORY_STATUS
from halfmoon_sandbox.errors import (
    ChildLost,
    ChildStalled,
    ChildUnavailable,
    HandlerFailed,
    LimitExceeded,
)

#: Wall-clock limit of a call: so many times its processor limit, plus so many seconds.
_WALL_FACTOR = 10.0
_WALL_EXTRA_S = 5.0
#: Signals that end a process for what it did itself, unless another process sent them.
FAULTS = frozenset(
    (
        signal.SIGABRT,  # native code without memory, or a failed check of its own
        *(signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP),
    )
)


class ParentTemplate(Protocol):
    """The template process that a child was forked from; `Sandbox` implements it."""

    def pid_of(self, number: int) -> int:
        """Return the process id of a child; 0 when it has ended."""
        ...

    def exit_status(self, number: int) -> int | None:
        """Reap a child that has ended; return None when the template has gone too."""
        ...

    def kill(self, number: int) -> None:
        """End a child. Does not wait."""
        ...


class Child:
    """A fork of a sandbox's template. Close it; not thread-safe."""

    def __init__(self, template: ParentTemplate, connection: socket.socket, number: int) -> None:
        connection.setblocking(False)
        self._template = template
        self._connection: socket.socket | None = connection
        self._number = number
        #: Processor seconds that all its answers took.
        self.cpu_s = 0.0
        self._to_send = memoryview(b"")
        self._received = bytearray()
        self._allowed_s = 0.0
        #: Deadline of the request under way by `time.monotonic`; None: there is none.
        self._deadline_s: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id, requested from the template; 0 when the child has ended."""
        return self._template.pid_of(self._number)

    @property
    def alive(self) -> bool:
        """True until the child has ended."""
        return self._connection is not None

    @property
    def busy(self) -> bool:
        """True while a request is under way."""
        return self._deadline_s is not None

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with an answer; for `selectors`.

        Raises:
            ChildUnavailable: the child has ended.
        """
        return self._socket().fileno()

    def call(self, request: bytes, *, cpu_s: float) -> bytes:
        """Send a request and wait for the answer.

        Raises:
            HandlerFailed, LimitExceeded, ChildUnavailable: see `poll`.
        """
        self.begin(request, cpu_s=cpu_s)
        while (answer := self.poll()) is None:
            wait_readable([self], 1.0)
        return answer

    async def call_async(self, request: bytes, *, cpu_s: float) -> bytes:
        """Send a request and await the answer. A cancelled call ends the child.

        Raises:
            HandlerFailed, LimitExceeded, ChildUnavailable: see `poll`.
        """
        self.begin(request, cpu_s=cpu_s)
        try:
            while (answer := self.poll()) is None:
                await self._progress()
        except asyncio.CancelledError:
            self.close()
            raise
        return answer

    def begin(self, request: bytes, *, cpu_s: float) -> None:
        """Send as much of a request as the socket takes at once; `poll` sends the rest.

        Args:
            request: for the handler.
            cpu_s: processor seconds after which the child is ended.

        Raises:
            ChildUnavailable: the child has ended.
        """
        assert not self.busy, "a child serves one request at a time"
        self._socket()
        self._to_send = memoryview(frames.encode_frame(frames.REQUEST.pack(cpu_s), request))
        self._allowed_s = cpu_s
        self._deadline_s = time.monotonic() + _WALL_FACTOR * cpu_s + _WALL_EXTRA_S
        self._send()

    def poll(self) -> bytes | None:
        """Return the answer once it has come; None while it may still come.

        Raises:
            HandlerFailed: the handler raised.
            LimitExceeded: the request passed a limit or crashed the child, which has ended.
            ChildLost: the child was ended from outside.
            ChildStalled: the child did not get enough processor time to answer, and is ended.
            ChildUnavailable: the child had ended before, or its template has.
        """
        assert self._deadline_s is not None, "nothing was asked"
        self._send()
        answer = self._receive()
        if answer is None and time.monotonic() > self._deadline_s:
            self.close()
            raise ChildStalled("the child process got too little processor time to answer")
        return answer

    def close(self) -> None:
        """End the process. Does not wait."""
        if self._connection is None:
            return
        self._let_go()
        self._template.kill(self._number)

    # -- parts -------------------------------------------------------------------------------

    def _socket(self) -> socket.socket:
        if self._connection is None:
            raise ChildUnavailable("the child process has ended")
        return self._connection

    def _send(self) -> None:
        connection = self._socket()
        with suppress(BlockingIOError, ConnectionError):  # that it ended, reading tells
            while self._to_send:
                self._to_send = self._to_send[connection.send(self._to_send) :]

    def _receive(self) -> bytes | None:
        connection = self._socket()
        try:
            while (missing := self._missing()) > 0:
                data = connection.recv(min(missing, 1 << 20))
                if not data:
                    self._ended()
                self._received += data
        except BlockingIOError:
            return None
        except ConnectionError:
            self._ended()
        body = bytes(self._received[frames.LENGTH_FORMAT.size :])
        self._received.clear()
        self._deadline_s = None
        status, used_s = frames.RESPONSE.unpack_from(body)
        self.cpu_s += used_s
        payload = body[frames.RESPONSE.size :]
        if status != frames.OK:
            raise HandlerFailed(payload.decode("utf-8", "replace"))
        return payload

    def _missing(self) -> int:
        """Return the missing bytes of the answer, as far as its length is known."""
        if len(self._received) < frames.LENGTH_FORMAT.size:
            return frames.LENGTH_FORMAT.size - len(self._received)
        (n_bytes,) = frames.LENGTH_FORMAT.unpack_from(self._received)
        if n_bytes > frames.MAX_FRAME_BYTES:
            self.close()
            raise LimitExceeded("crash", "its child process answered garbage", proven=False)
        return int(n_bytes) + frames.LENGTH_FORMAT.size - len(self._received)

    def _ended(self) -> NoReturn:
        status = self._template.exit_status(self._number)
        if status is None or status == NO_CHILD:
            self._let_go()
            raise ChildUnavailable(
                "the child process has ended with its template, or was never forked"
            )
        self._let_go()
        if status == -signal.SIGPROF:
            detail = f"it took over {self._allowed_s:g} s of processor time"
            raise LimitExceeded("time", detail)
        if status == OUT_OF_MEMORY_STATUS:
            raise LimitExceeded("memory", "it took more memory than it may")
        if status == -signal.SIGABRT:
            raise LimitExceeded("memory", "it took more memory than it may", proven=False)
        if status < 0 and -status not in FAULTS:
            raise ChildLost(f"the child process was ended from outside (signal {-status})")
        raise LimitExceeded("crash", f"it crashed its process (status {status})", proven=False)

    def _let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._deadline_s = None

    async def _progress(self) -> None:
        """Wait until the socket may take or give bytes, or the deadline has come."""
        loop = asyncio.get_running_loop()
        moved = asyncio.Event()
        descriptor = self.fileno()
        loop.add_reader(descriptor, moved.set)
        if self._to_send:
            loop.add_writer(descriptor, moved.set)
        assert self._deadline_s is not None
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._deadline_s - time.monotonic()) + 0.01):
                    await moved.wait()
        finally:
            loop.remove_reader(descriptor)
            loop.remove_writer(descriptor)


def wait_readable(children: Sequence[Child], timeout_s: float) -> None:
    """Wait until a child has bytes of an answer, or takes more of its request."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if child._to_send else 0)
            selector.register(child, wanted)
        selector.select(timeout_s)
