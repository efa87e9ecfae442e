"""Move messages between a ZeroMQ socket and the event loop, at few system calls per message.

libzmq's threads serve the connections; a descriptor tells the event loop that something changed.
The descriptor is watched for the socket's life. It stays readable until the socket's state is
looked at, and after that it tells only of changes. Sending may consume such a signal too.

    signal ──▶ the first message ──▶ look ──▶ all that are there ──▶ look, if more are left
    send ────────────────────────────▲

A signal and a send each make a look due, in the same turn of the event loop and after what a
message led to. Several make one look, which costs about as much as receiving a message. A look is
bounded in messages and bytes, and the rest waits for the next turn. So a peer that sends without
pause delays others, but never stops them. libzmq takes turns between the peers of a socket.
"""

import asyncio
from collections.abc import Callable

import structlog
import zmq

Frames = list[bytes]

#: Messages and bytes after which other callbacks run, however fast messages arrive.
BATCH_MESSAGES = 64
_BATCH_BYTES = 1024 * 1024
#: Frames of one message whose bytes are kept; messages of peers have three at the most.
_KEPT_FRAMES = 4
#: Seconds that messages may still be on their way from the I/O thread.
_LATE_MESSAGE_S = 0.02

# Plain integers: arithmetic with the enumerations takes longer than the system calls.
_NOBLOCK = int(zmq.NOBLOCK)
_MORE_NOBLOCK = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)

_log = structlog.get_logger(__name__)


class SocketPump:
    """Read and write one socket from its event loop.

    Args:
        socket: that nobody else reads.
        kept_frames: frames of one message whose bytes are kept; further ones are empty.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", *, kept_frames: int = _KEPT_FRAMES) -> None:
        self.socket = socket
        self._kept_frames = kept_frames
        # Past the wrapper, which only adds what frames for other kinds of sockets need.
        self._send: Callable[[bytes, int], object] = super(zmq.Socket, socket).send
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._take: Callable[[Frames], None] = _drop
        self._on_failure: Callable[[], None] = _ignore
        #: Set while messages are handed over.
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Whether a look at the socket is due in this turn of the event loop, or in the next.
        self._is_due = False
        #: Messages handed over so far.
        self._n_taken = 0

    def start(
        self,
        take: Callable[[Frames], None],
        *,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """Hand over messages from now on, until `stop`.

        Args:
            take: gets each message, in the order of arrival.
            on_failure: called once if reading fails, which stops it; the log has the error.
        """
        self._take = take
        self._on_failure = on_failure or _ignore
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._on_signal)
        self._look_soon()

    def stop(self) -> None:
        """Leave further messages in the socket; call it before the socket is closed."""
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
            self._loop = None

    async def settle(self) -> None:
        """Return once all messages are handed over, those that are still on their way too."""
        while self._loop is not None:
            n_before = self._n_taken
            await asyncio.sleep(_LATE_MESSAGE_S)
            if self._loop is None or (n_before == self._n_taken and not self._has_message()):
                return
            self._look_soon()

    def send_now(self, *frames: bytes) -> None:
        """Queue a message without waiting.

        Raises:
            zmq.Again: the queue is full.
            zmq.ZMQError: EHOSTUNREACH when a ROUTER has no such peer.
        """
        try:
            for frame in frames[:-1]:
                self._send(frame, _MORE_NOBLOCK)
            self._send(frames[-1], _NOBLOCK)
        finally:
            # A send, even a failed one, may consume the descriptor's signal that a message arrived
            # or that the peer left. A peer whose queue is full counts as connected until a look
            # has found that nothing more comes from it.
            if self._loop is None:
                self._has_message()
            else:
                self._look_soon()

    def _look_soon(self) -> None:
        """Look for messages in this turn of the event loop, also without a signal."""
        if not self._is_due and self._loop is not None:
            self._is_due = True
            self._loop.call_soon(self._look)

    def _on_signal(self) -> None:
        """Hand over the first message, and look for more once that has led to what it leads to."""
        try:
            self._hand_over_one()
        except zmq.Again:
            return  # a signal of something else; trying to receive has cleared it
        except Exception:
            self._fail()
            return
        self._look_soon()

    def _look(self) -> None:
        """Hand over what is there, up to the bounds of one turn."""
        self._is_due = False
        n_bytes = 0
        try:
            for _ in range(BATCH_MESSAGES):
                if self._loop is None or not self._has_message():
                    return
                n_bytes += self._hand_over_one()
                if n_bytes >= _BATCH_BYTES:
                    break
        except Exception:
            self._fail()
            return
        self._look_soon()

    def _hand_over_one(self) -> int:
        """Hand over the next message, and return its bytes.

        Raises:
            zmq.Again: there is none.
        """
        frames = self._receive()
        self._n_taken += 1
        self._take(frames)
        return sum(map(len, frames))

    def _fail(self) -> None:
        _log.exception("socket_failed")
        self.stop()
        self._on_failure()

    def _has_message(self) -> bool:
        state = self.socket.getsockopt(_EVENTS)
        assert isinstance(state, int)
        return bool(state & _POLLIN)

    def _receive(self) -> Frames:
        frames: Frames = []
        more = True
        while more:
            # A frame knows whether it is the last one; asking the socket costs a call more.
            frame = self.socket.recv(_NOBLOCK, copy=False)
            more = frame.more
            frames.append(frame.bytes if len(frames) < self._kept_frames else b"")
        return frames


def _drop(frames: Frames) -> None:
    pass


def _ignore() -> None:
    pass
