"""Keep the streams of this conductor that a client may come back to, within limits.

A stream is kept while a client reads it, and `window_s` longer. What is dropped, or was never here,
is computed again: the same body and seed give the same events.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from halfmoon_conductor.errors import IdempotencyKeyReused
from halfmoon_conductor.http_server.auth_middleware import Principal
from halfmoon_conductor.http_server.resumption_headers import Resumption
from halfmoon_conductor.resumption.resumable_stream import ResumableStream
from halfmoon_conductor.resumption.resumption_limits import (
    ResumptionLimits,
    StreamPhase,
    choose_victim,
)

#: Share of the bytes that is left when some have to go: each choice looks at all streams.
_LEFT_SHARE = 7 / 8


@dataclass(eq=False)
class _Kept:
    """A kept stream, and what is counted of it."""

    stream: ResumableStream
    #: Most streams of its tenant that are generated without a reader.
    max_detached: int
    #: Bytes of its events.
    n_bytes: int = 0
    #: Drops it; None while a client reads it.
    timer: asyncio.TimerHandle | None = None


class ResumableStreams:
    """Find and keep streams by the hash of tenant and key."""

    def __init__(self, limits: ResumptionLimits) -> None:
        self._limits = limits
        self._kept: dict[str, _Kept] = {}
        self._n_bytes = 0

    @property
    def n_kept(self) -> int:
        """Streams that are kept now."""
        return len(self._kept)

    @property
    def n_bytes(self) -> int:
        """Bytes of the events of kept streams."""
        return self._n_bytes

    def find(self, resumption: Resumption) -> ResumableStream | None:
        """Return the kept stream of a request; None: it is to be computed.

        Raises:
            IdempotencyKeyReused: the key's stream answers another body.
        """
        last, kept = resumption.last, self._kept.get(resumption.name)
        is_other = last is not None and last.body_tag != resumption.body_tag
        if is_other or (kept is not None and kept.stream.body_tag != resumption.body_tag):
            raise IdempotencyKeyReused(
                "This Idempotency-Key was sent with another body or to another route; repeat "
                "both exactly, or send another key.",
                param="idempotency-key",
            )
        return None if kept is None else kept.stream

    def start(
        self,
        resumption: Resumption,
        principal: Principal,
        events: AsyncGenerator[bytes, None],
        token_tag: Callable[[], str],
        error_event: Callable[[Exception], bytes],
    ) -> ResumableStream:
        """Return the stream of a request; its first reader starts the generation.

        Args:
            resumption: names it.
            principal: sent the request.
            events: writes the events.
            token_tag: returns the tag of all tokens in the events so far.
            error_event: writes the last event of a stream that fails midway.

        Raises:
            IdempotencyKeyReused: a stream of this key that answers another body has begun.
        """
        # Two requests of one key may have been prepared at the same time.
        if (other := self.find(resumption)) is not None:
            return other
        stream = ResumableStream(
            resumption,
            principal.name,
            events,
            token_tag,
            error_event,
            is_kept=self._limits.window_s > 0,
            on_change=self._on_change,
        )
        if stream.is_kept:
            limit = principal.tenant.max_concurrent if principal.tenant else None
            self._kept[stream.name] = _Kept(stream, limit or self._limits.max_streams)
            self._on_change(stream)
            if self.n_kept > self._limits.max_streams:
                self._drop(choose_victim(self._streams(), lambda _: 1))
        return stream

    async def close(self) -> None:
        """Stop all streams."""
        for stream in self._streams():
            self._drop(stream)
            stream.stop()
            await stream.wait()

    def check(self) -> None:
        """Check that counts and timers are those of the kept streams."""
        assert self._n_bytes == sum(kept.n_bytes for kept in self._kept.values())
        assert self._n_bytes <= self._limits.max_bytes
        assert self.n_kept <= self._limits.max_streams
        for kept in self._kept.values():
            assert kept.n_bytes == kept.stream.log.n_bytes
            assert (kept.timer is None) == kept.stream.has_reader

    def _streams(self) -> list[ResumableStream]:
        return [kept.stream for kept in self._kept.values()]

    def _on_change(self, stream: ResumableStream) -> None:
        kept = self._kept.get(stream.name)
        if kept is None or kept.stream is not stream:
            return
        if stream.has_failed:
            self._drop(stream)  # computed again, it may succeed
            return
        self._n_bytes += stream.log.n_bytes - kept.n_bytes
        kept.n_bytes = stream.log.n_bytes
        if stream.has_reader:
            if kept.timer is not None:
                kept.timer.cancel()
                kept.timer = None
        elif kept.timer is None:
            loop = asyncio.get_running_loop()
            kept.timer = loop.call_later(self._limits.window_s, self._drop, stream)
            self._bound_detached(kept)
        if self._n_bytes > self._limits.max_bytes:
            while self._n_bytes > self._limits.max_bytes * _LEFT_SHARE:
                self._drop(choose_victim(self._streams(), lambda each: each.log.n_bytes))

    def _bound_detached(self, kept: _Kept) -> None:
        detached = [
            each
            for each in self._streams()
            if each.tenant == kept.stream.tenant and each.phase is StreamPhase.DETACHED
        ]
        if len(detached) > kept.max_detached:
            self._drop(min(detached, key=lambda each: each.since_s))

    def _drop(self, stream: ResumableStream) -> None:
        """Keep a stream no longer: it ends with its reader, or at once if it has none."""
        kept = self._kept.pop(stream.name)
        self._n_bytes -= kept.n_bytes
        if kept.timer is not None:
            kept.timer.cancel()
        stream.stop_keeping()
