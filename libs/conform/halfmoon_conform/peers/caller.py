"""Call a worker over a DEALER socket: send any frames, and wait for answers.

One task reads the socket into an inbox, and waits look there, so no message is lost to a timeout.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import zmq

from halfmoon_conform.pattern_matcher import difference
from halfmoon_conform.peers.curve_sockets import (
    Context,
    HandshakeWatch,
    open_socket,
    secure_caller,
)
from halfmoon_conform.peers.wire_maps import WireMap, decode_frame, encode_map
from halfmoon_conform.verdict import CheckFailed

#: Seconds for an answer, on a machine that is busy.
ANSWER_S = 20.0
#: Fields that tie an answer to its question.
_CORRELATED = ("ticket", "request_id")
#: Messages that arrive by themselves and answer no question.
_UNASKED = ("welcome",)


def is_draining_welcome(message: WireMap) -> bool:
    """Return whether a message is the record of a worker that takes nothing new."""
    return message.get("type") == "welcome" and message["worker"].get("draining") is True


class Caller:
    """One connection to the commands socket of a worker."""

    def __init__(
        self, context: Context, endpoint: str, cluster_key: str, answer_s: float = ANSWER_S
    ) -> None:
        self._answer_s = answer_s
        self._socket = open_socket(context, zmq.DEALER)
        secure_caller(self._socket, cluster_key)
        self._handshakes = HandshakeWatch(self._socket, cluster_key)
        self._socket.connect(endpoint)
        self._foreign_versions = itertools.cycle(range(100, 256))
        #: Messages that no wait has taken, oldest first.
        self.inbox: list[WireMap] = []
        #: Every message that arrived, for a failure's text.
        self.received: list[str] = []
        self._fault: CheckFailed | None = None
        self._arrived = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())

    async def send(self, message: WireMap) -> None:
        """Send one message, whose values are not checked."""
        await self.send_frames(encode_map(message))

    async def send_frames(self, *frames: bytes) -> None:
        """Send these frames as they are, as one ZeroMQ message."""
        await self._socket.send_multipart(frames)

    async def expect(self, pattern: WireMap, *, within_s: float | None = None) -> WireMap:
        """Take the first message that answers the same question, and match it.

        The question is the pattern's ticket or request id. A pattern without one takes the first
        message of its type.

        Raises:
            CheckFailed: none came in time, or it does not match.
        """
        found = await self.take(lambda message: _answers(pattern, message), pattern, within_s)
        if wrong := difference(pattern, found):
            raise CheckFailed(f"{found.get('type')}: {wrong}; it was {_short(found)}")
        return found

    async def take(
        self, wanted: Callable[[WireMap], bool], what: Any, within_s: float | None = None
    ) -> WireMap:
        """Take the first message that a function wants.

        Raises:
            CheckFailed: none came in time, and the text names `what`; or a frame came that is no
                message.
        """
        found: list[WireMap] = []
        within_s = self._answer_s if within_s is None else within_s

        def look() -> bool:
            for message in self.inbox:
                if wanted(message):
                    found.append(message)
                    self.inbox.remove(message)
                    return True
            return self._fault is not None

        async with self._arrived:
            try:
                await asyncio.wait_for(self._arrived.wait_for(look), within_s)
            except TimeoutError:
                heard = ", ".join(self.received[-6:])
                heard = heard or f"nothing{await self._handshakes.fault()}"
                raise CheckFailed(
                    f"no answer within {within_s:g} s: waited for {_short(what)}; received {heard}"
                ) from None
        if self._fault is not None:
            raise self._fault
        return found[0]

    async def settle(self) -> None:
        """Wait until the worker has read all that was sent before: it answers a further hello.

        Messages of one connection keep their order, so an earlier answer is here by then. The hello
        is of versions that no worker speaks: it changes nothing, and each one is answered, while a
        `welcome` may come at any time.
        """
        self.inbox = [message for message in self.inbox if message.get("type") not in _UNASKED]
        await self._read_answers()

    async def _read_answers(self) -> None:
        version = next(self._foreign_versions)
        hello: WireMap = {"type": "hello", "conductor_id": self._name, "session": 2}
        await self.send({**hello, "min_version": version, "max_version": version})
        await self.take(
            lambda m: (m.get("type"), m.get("got")) == ("wrong_version", version),
            f"wrong_version, the answer to a hello of the versions {version} to {version}",
        )

    async def expect_none(self, pattern: WireMap) -> None:
        """See that no message that matches came for what was sent until now.

        Raises:
            CheckFailed: one came.
        """
        # What answers no question stays here: it may be what must not come.
        await self._read_answers()
        for message in self.inbox:
            if not difference(pattern, message):
                raise CheckFailed(f"answered {_short(message)}, and should not")

    _name = "conform"

    async def greet(self, name: str) -> WireMap:
        """Say hello under a name, and return the welcome."""
        self._name = name
        await self.send({"type": "hello", "conductor_id": name, "session": 1})
        return await self.expect({"type": "welcome"})

    @property
    def closed(self) -> bool:
        """Return whether the kit has hung up."""
        return bool(self._socket.closed)

    async def close(self) -> None:
        """Hang up."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._handshakes.close()
        self._socket.close(linger=200)

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            async with self._arrived:
                try:
                    if len(frames) != 1:
                        raise CheckFailed(f"sent {len(frames)} frames where one is a message")
                    message = decode_frame(frames[0])
                    self.inbox.append(message)
                    self.received.append(str(message.get("type")))
                except CheckFailed as fault:
                    self._fault = self._fault or fault
                self._arrived.notify_all()


def _answers(pattern: WireMap, message: WireMap) -> bool:
    for field in _CORRELATED:
        if isinstance(pattern.get(field), str):
            return bool(message.get(field) == pattern[field])
    return not difference({"type": pattern.get("type", {"$any": True})}, message)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 300 else f"{text[:300]}…"
