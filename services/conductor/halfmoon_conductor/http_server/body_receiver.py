"""Bodies of requests while they are read: how long, how fast, and how many bytes of all together.

A body is read whole before its request takes a slot or any work is done for it. Small bodies
are always taken, so that large ones that fill the memory do not keep them out.
"""

import asyncio

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from halfmoon_conductor.errors import BodyTooLarge, RequestTimedOut, ServerOverloaded
from halfmoon_conductor.http_server.disconnect import ClientGone

#: A body of so many bytes is taken however many others there are.
SMALL_BYTES = 64 * 1024
_RETRY_S = 1.0
_SCOPE_KEY = "halfmoon.body"


class BodyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What is taken."""

    #: A prompt of a million tokens fits, as text or as ids.
    max_bytes: int = 8 * 1024 * 1024
    #: Of all bodies that are being read, or being made prompts of.
    max_total_bytes: int = 1024 * 1024 * 1024
    #: No byte for so long, and the request is refused.
    timeout_s: float = 30.0
    #: Over all of a body, with `timeout_s` added to its time.
    least_bytes_per_s: int = 16 * 1024


class ReceivedBody:
    """One request's, held until `release`."""

    def __init__(self, bodies: "BodyReceiver") -> None:
        self._bodies = bodies
        self._n_bytes = 0
        #: Empty until all of it was read, and after `release`.
        self.content = b""
        self.is_read = False

    def release(self) -> None:
        """Let go of it; once more is fine."""
        self._bodies.n_bytes -= self._n_bytes
        self._n_bytes = 0
        self.content = b""

    async def read(self, receive: Receive) -> None:
        """Read all of it into `content`.

        Raises:
            BodyTooLarge: over `BodyLimits.max_bytes`.
            TooSlow: it does not come, or too slowly.
            Overloaded: too many large ones are being read.
            ClientGone: the client hung up first.
        """
        limits, loop = self._bodies.limits, asyncio.get_running_loop()
        began_s, pieces = loop.time(), []
        try:
            async with asyncio.timeout_at(began_s + limits.timeout_s) as deadline:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece = message.get("body", b"")
                    self._take(len(piece))
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        break
                    earned_s = limits.timeout_s + self._n_bytes / limits.least_bytes_per_s
                    deadline.reschedule(min(began_s + earned_s, loop.time() + limits.timeout_s))
        except TimeoutError:
            raise RequestTimedOut(
                f"{self._n_bytes} bytes of the body came in {loop.time() - began_s:.1f} s; send "
                f"some at least every {limits.timeout_s:g} s, and "
                f"{limits.least_bytes_per_s} a second over all."
            ) from None
        self.is_read = True
        self.content = pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _take(self, n_bytes: int) -> None:
        bodies = self._bodies
        self._n_bytes += n_bytes
        bodies.n_bytes += n_bytes
        if self._n_bytes > bodies.limits.max_bytes:
            raise bodies.too_large_error()
        if self._n_bytes > SMALL_BYTES and bodies.n_bytes > bodies.limits.max_total_bytes:
            raise ServerOverloaded(
                f"{bodies.limits.max_total_bytes} bytes of bodies are being read, the most that "
                f"are taken at once; bodies of up to {SMALL_BYTES} bytes still are.",
                _RETRY_S,
            )


class BodyReceiver:
    """All that are held."""

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self.n_bytes = 0

    def opened(self) -> ReceivedBody:
        """Begin one; `release` it."""
        return ReceivedBody(self)

    def too_large_error(self) -> BodyTooLarge:
        """What to say of a body over the limit."""
        return BodyTooLarge(
            f"The body is over {self.limits.max_bytes} bytes, the most that is accepted."
        )

    def check_content_length(self, scope: Scope) -> None:
        """Refuse a body by the length that its header gives, unread.

        Raises:
            BodyTooLarge: it is over the limit.
        """
        value = Headers(scope=scope).get("content-length", "")
        # More digits than any length that is taken: no need to know which number it is.
        if value.isdecimal() and (len(value) > 18 or int(value) > self.limits.max_bytes):
            raise self.too_large_error()


def replay_body(scope: Scope, body: ReceivedBody, receive: Receive) -> Receive:
    """Put a body that was read back before what the server says next."""
    scope[_SCOPE_KEY] = body
    is_told = False

    async def replayed() -> Message:
        nonlocal is_told
        if is_told:
            return await receive()
        is_told = True
        return {"type": "http.request", "body": body.content, "more_body": False}

    return replayed


def received_body_of(scope: Scope) -> ReceivedBody:
    """The body of this scope's request, which was read before its route."""
    body = scope[_SCOPE_KEY]
    assert isinstance(body, ReceivedBody)
    return body
