"""Run one stream apart from the connection that reads it.

A task of its own advances the generator and appends its events to a log. One reader at a time sends
them. A stream that is kept goes on without a reader. One that is not kept ends with its reader, and
holds no more than this reader has yet to send.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from halfmoon_conductor.errors import GenerationFailed, ResumptionMismatch, StreamTakenOver
from halfmoon_conductor.http_server.resumption_headers import EventId, Resumption
from halfmoon_conductor.resumption.event_log import EventLog
from halfmoon_conductor.resumption.resumption_limits import StreamPhase

#: Bytes that are sent at once: a client that does not read holds as many for each connection.
_MAX_SENT_BYTES = 64 * 1024
#: Bytes that wait for the reader of a stream that is not kept; with more, generation waits.
_MAX_UNREAD_BYTES = 64 * 1024


class ResumableStream:
    """One answer as numbered events.

    Args:
        resumption: names it.
        tenant: the tenant's name; empty without tenants.
        events: writes the events.
        token_tag: returns the tag of all tokens in the events so far.
        error_event: writes the last event of a stream that fails midway.
        is_kept: whether it goes on without a reader.
        on_change: is called with each change of its reader, its end or its bytes.
    """

    def __init__(
        self,
        resumption: Resumption,
        tenant: str,
        events: AsyncGenerator[bytes, None],
        token_tag: Callable[[], str],
        error_event: Callable[[Exception], bytes],
        *,
        is_kept: bool,
        on_change: Callable[["ResumableStream"], None],
    ) -> None:
        self.name = resumption.name
        self.body_tag = resumption.body_tag
        self.tenant = tenant
        self.error_event = error_event
        self.is_kept = is_kept
        self.log = EventLog(resumption.body_tag)
        self.since_s = asyncio.get_running_loop().time()
        self._events = events
        self._token_tag = token_tag
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        #: The connection that reads now: a mark of its own.
        self._reader: object | None = None
        #: Number of the last event that the reader has sent.
        self._n_sent = 0
        self._is_over = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def phase(self) -> StreamPhase:
        """Return what it is still for."""
        if self._reader is not None or self._task is None:
            return StreamPhase.ATTACHED  # or about to be, by the request that made it
        return StreamPhase.ENDED if self._is_over else StreamPhase.DETACHED

    @property
    def has_failed(self) -> bool:
        """Return whether it ended with an error."""
        return self._error is not None

    @property
    def has_reader(self) -> bool:
        """Return whether a client reads it."""
        return self._reader is not None

    async def read(self, last: EventId | None) -> AsyncGenerator[bytes, None]:
        """Yield the events after `last`, those to come included; None: all.

        An earlier reader ends with `StreamTakenOver`.

        Raises:
            StreamTakenOver: a later reader took the stream over.
            ResumptionMismatch: `last` is no event of this stream.
            Exception: as the generator raised it.
        """
        reader, n = object(), 0 if last is None else last.number
        self._attach(reader, n)
        try:
            while self.log.n_events < n and not self._is_over:
                await self._change(reader)
            if last is not None:
                self._verify(last)
            while True:
                if self.log.n_events > n:
                    data, n = self.log.after(n, _MAX_SENT_BYTES)
                    yield data
                    self._on_sent(reader, n)
                elif self._error is not None:
                    raise self._error
                elif self._is_over:
                    return
                else:
                    await self._change(reader)
        finally:
            if self._reader is reader:
                self._reader = None
                self._mark()
                if not self.is_kept:
                    self.stop()

    def stop_keeping(self) -> None:
        """End the stream with its reader, or at once if it has none."""
        self.is_kept = False
        if self._reader is None:
            self.stop()
        else:
            self.log.trim(self._n_sent)

    def stop(self) -> None:
        """Stop generating."""
        if self._task is not None and not self._is_over:
            self._task.cancel()

    async def wait(self) -> None:
        """Wait until nothing is generated."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _attach(self, reader: object, n_sent: int) -> None:
        self._reader, self._n_sent = reader, n_sent
        if self._task is None and not self._is_over:
            self._task = asyncio.create_task(self._generate())
        self._mark()
        self._wake()

    async def _generate(self) -> None:
        error: Exception | None = GenerationFailed("The stream was dropped before its end.")
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    self.log.append(data, self._token_tag())
                    if self.is_kept:
                        self._on_change(self)
                    else:
                        self.log.trim(self._n_sent)
                    self._wake()
                    while not self.is_kept and self._n_unread_bytes > _MAX_UNREAD_BYTES:
                        await self._changed.wait()
            error = None
        except Exception as raised:
            error = raised
        finally:
            self._end(error)

    @property
    def _n_unread_bytes(self) -> int:
        # What a resumed reader has received already is not held for it.
        return self.log.n_bytes if self.log.n_events > self._n_sent else 0

    def _end(self, error: Exception | None) -> None:
        self._error, self._is_over = error, True
        self._on_change(self)
        self._wake()

    def _verify(self, last: EventId) -> None:
        found = self.log.id_of(last.number)
        if found == str(last):
            return
        if found is None and self._error is not None:
            raise self._error
        raise ResumptionMismatch(
            f"Last-Event-ID is {last}, and this answer's event {last.number} is "
            f"{found or 'not there: it has ' + str(self.log.n_events)}. What was received "
            "can't be continued: send the request with another Idempotency-Key.",
            param="last-event-id",
        )

    def _on_sent(self, reader: object, n: int) -> None:
        if self._reader is reader:
            self._n_sent = n
            if not self.is_kept:
                self.log.trim(n)
                self._wake()

    async def _change(self, reader: object) -> None:
        """Wait for the next change.

        Raises:
            StreamTakenOver: another reader has come.
        """
        if self._reader is reader:
            await self._changed.wait()
        if self._reader is not reader:
            raise StreamTakenOver(
                "Another connection with this Idempotency-Key reads the rest of this stream."
            )

    def _mark(self) -> None:
        self.since_s = asyncio.get_running_loop().time()
        self._on_change(self)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
