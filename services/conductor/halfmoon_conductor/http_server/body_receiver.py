"""Receive request bodies within limits of size, time and total memory.

A body is received completely before its request takes a slot or causes any work. Small bodies are
always accepted, so that large ones that fill the memory do not block them.
"""

import asyncio

import msgspec
from starlette.types import Message, Receive, Scope

from halfmoon_conductor.errors import BodyTooLarge, RequestTimedOut, ServerOverloaded
from halfmoon_conductor.http_server.disconnect import ClientGone
from halfmoon_conductor.http_server.headers import header_of
from halfmoon_conductor.http_server.heap_trimming import HeapTrimmer

#: Bodies up to this size are accepted however many others are being read.
SMALL_BYTES = 64 * 1024
_RETRY_S = 1.0
_SCOPE_KEY = "halfmoon.body"


class BodyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on request bodies."""

    #: A prompt of a million tokens fits, as text or as ids.
    max_bytes: int = 8 * 1024 * 1024
    #: Bytes of all bodies that are being received or turned into prompts.
    max_total_bytes: int = 1024 * 1024 * 1024
    #: Seconds without a byte after which the request is refused.
    timeout_s: float = 30.0
    #: Least mean rate over a body, with `timeout_s` added to its time.
    least_bytes_per_s: int = 16 * 1024


class ReceivedBody:
    """The body of one request, held in memory until `release`."""

    def __init__(self, receiver: "BodyReceiver") -> None:
        self._receiver = receiver
        self._n_bytes = 0
        #: Empty until the body has been read completely, and after `release`.
        self.content = b""
        self.is_read = False

    def release(self) -> None:
        """Free the body; calling it again does nothing."""
        self._receiver.on_released(self._n_bytes)
        self._n_bytes = 0
        self.content = b""

    async def read(self, receive: Receive, *, is_here: bool = False) -> None:
        """Read the whole body into `content`.

        Args:
            receive: the request's.
            is_here: the server has the whole body already, so that nothing is waited for.

        Raises:
            BodyTooLarge: it is over `BodyLimits.max_bytes`.
            RequestTimedOut: it does not arrive, or too slowly.
            ServerOverloaded: too many large bodies are being read.
            ClientGone: the client disconnected first.
        """
        chunks: list[bytes] = []
        if is_here:
            while await self._read_chunk(receive, chunks):
                pass
        else:
            await self._read_in_time(receive, chunks)
        self.is_read = True
        self.content = chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _read_in_time(self, receive: Receive, chunks: list[bytes]) -> None:
        limits, loop = self._receiver.limits, asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.timeout_at(began_s + limits.timeout_s) as deadline:
                while await self._read_chunk(receive, chunks):
                    allowed_s = limits.timeout_s + self._n_bytes / limits.least_bytes_per_s
                    deadline.reschedule(min(began_s + allowed_s, loop.time() + limits.timeout_s))
        except TimeoutError:
            raise RequestTimedOut(
                f"{self._n_bytes} bytes of the body came in {loop.time() - began_s:.1f} s; send "
                f"some at least every {limits.timeout_s:g} s, and "
                f"{limits.least_bytes_per_s} a second over all."
            ) from None

    async def _read_chunk(self, receive: Receive, chunks: list[bytes]) -> bool:
        """Read and keep the next chunk; return whether more follow."""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        self._take(len(chunk))
        chunks.append(chunk)
        return bool(message.get("more_body", False))

    def _take(self, n_bytes: int) -> None:
        receiver = self._receiver
        self._n_bytes += n_bytes
        receiver.n_bytes += n_bytes
        if self._n_bytes > receiver.limits.max_bytes:
            raise receiver.too_large_error()
        if self._n_bytes > SMALL_BYTES and receiver.n_bytes > receiver.limits.max_total_bytes:
            raise ServerOverloaded(
                f"{receiver.limits.max_total_bytes} bytes of bodies are being read, the most that "
                f"are taken at once; bodies of up to {SMALL_BYTES} bytes still are.",
                _RETRY_S,
            )


class BodyReceiver:
    """Receive bodies and bound the bytes of all of them together."""

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self.n_bytes = 0
        self._trimmer = HeapTrimmer()

    def open(self) -> ReceivedBody:
        """Return a new body; call `release` on it in the end."""
        return ReceivedBody(self)

    def on_released(self, n_bytes: int) -> None:
        """Make room for other bodies, and let the system have the memory again."""
        self.n_bytes -= n_bytes
        self._trimmer.on_freed(n_bytes)

    def too_large_error(self) -> BodyTooLarge:
        """Return the error for a body over the limit."""
        return BodyTooLarge(
            f"The body is over {self.limits.max_bytes} bytes, the most that is accepted."
        )

    def check_content_length(self, scope: Scope) -> None:
        """Check the length that the header declares, before anything is read.

        Raises:
            BodyTooLarge: the declared length is over the limit.
        """
        value = header_of(scope, b"content-length")
        # With more digits than any accepted length, the number need not be parsed.
        if value.isdecimal() and (len(value) > 18 or int(value) > self.limits.max_bytes):
            raise self.too_large_error()


def replay_body(scope: Scope, body: ReceivedBody, receive: Receive) -> Receive:
    """Return a `receive` that yields a body that was already read, then the server's messages."""
    scope[_SCOPE_KEY] = body
    is_replayed = False

    async def receive_again() -> Message:
        nonlocal is_replayed
        if is_replayed:
            return await receive()
        is_replayed = True
        return {"type": "http.request", "body": body.content, "more_body": False}

    return receive_again


def received_body_of(scope: Scope) -> ReceivedBody:
    """Return the body of this scope's request, which was received before its route ran."""
    body = scope[_SCOPE_KEY]
    assert isinstance(body, ReceivedBody)
    return body
