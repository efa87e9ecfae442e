"""Run one task for each request at a server: send it, pass its tokens on, say how it failed.

A failure is retryable unless the request itself is at fault. Before a failure is reported the
server is probed: if it is down, its workers leave, and the conductor retries all their requests.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import NamedTuple, Protocol

import structlog

from halfmoon_protocol import error_codes
from halfmoon_protocol.ids import RequestId
from halfmoon_servers.client.generate_call import GenerateCall, GeneratedTokens, PairPrefill
from halfmoon_servers.client.server_client import ServerClient
from halfmoon_servers.client.server_errors import NotServable, ServerError, ServerRefused

log = structlog.get_logger()

#: Characters of a failure's reason.
_MAX_REASON = 500


class StreamFailure(NamedTuple):
    """State why a server did not finish a request."""

    reason: str
    #: True when another try can succeed.
    retryable: bool
    #: True when the request itself is at fault.
    invalid: bool = False

    @property
    def code(self) -> str:
        """Return the code of `halfmoon_protocol.error_codes`."""
        return error_codes.PEER_FAILED if self.retryable else error_codes.INVALID


class StreamListener(Protocol):
    """Take what the tasks of a server's requests report."""

    def on_piece(self, request_id: RequestId, piece: GeneratedTokens) -> None:
        """Take the next tokens, or the usage at the end."""
        ...

    def on_pair_prefill(self, request_id: RequestId, prefill: PairPrefill) -> None:
        """Take the end of a prompt at the prefill server of a pair."""
        ...

    def on_failure(self, request_id: RequestId, failure: StreamFailure) -> None:
        """Take the end of a request that failed."""
        ...


class ServerStreams:
    """The running requests of one server, one task each."""

    def __init__(
        self,
        client: ServerClient,
        listener: StreamListener,
        tasks: asyncio.TaskGroup,
        is_alive: Callable[[], Awaitable[bool]],
    ) -> None:
        """Start without requests.

        Args:
            client: reaches the server.
            listener: gets what comes.
            tasks: the parent of all tasks.
            is_alive: probes the server after a failure.
        """
        self._client = client
        self._listener = listener
        self._tasks = tasks
        self._is_alive = is_alive
        self._running: dict[RequestId, asyncio.Task[None]] = {}

    def generate(self, request_id: RequestId, call: GenerateCall) -> None:
        """Have the server generate; its tokens come to the listener."""
        self._run(request_id, self._generate(request_id, call))

    def prefill(self, request_id: RequestId, call: GenerateCall) -> None:
        """Have the prefill server of a pair compute a prompt."""
        self._run(request_id, self._prefill(request_id, call))

    def stop(self, request_id: RequestId) -> None:
        """Close a request's connection, so that the server aborts it."""
        task = self._running.pop(request_id, None)
        if task is not None:
            task.cancel()

    def _run(self, request_id: RequestId, work: Coroutine[None, None, None]) -> None:
        self.stop(request_id)
        task = self._tasks.create_task(work, name=f"stream {request_id}")
        self._running[request_id] = task

        def forget(done: asyncio.Task[None]) -> None:
            if self._running.get(request_id) is done:
                del self._running[request_id]

        task.add_done_callback(forget)

    async def _generate(self, request_id: RequestId, call: GenerateCall) -> None:
        pieces = self._client.generate(call)
        try:
            async for piece in pieces:
                if not self._is_current(request_id):
                    return  # what was received before the stop must not count for a later stream
                self._listener.on_piece(request_id, piece)
        except ServerError as error:
            await self._fail(request_id, error)
        except Exception as error:  # a bug of ours costs only this request
            log.exception("stream_failed", request_id=request_id)
            self._listener.on_failure(request_id, StreamFailure(repr(error)[:_MAX_REASON], True))
        finally:
            await pieces.aclose()

    async def _prefill(self, request_id: RequestId, call: GenerateCall) -> None:
        try:
            prefill = await self._client.pair_prefill(call)
        except ServerError as error:
            await self._fail(request_id, error)
        except Exception as error:  # likewise
            log.exception("stream_failed", request_id=request_id)
            self._listener.on_failure(request_id, StreamFailure(repr(error)[:_MAX_REASON], True))
        else:
            self._listener.on_pair_prefill(request_id, prefill)

    def _is_current(self, request_id: RequestId) -> bool:
        """Return whether the running task is the one of a request, not one that was stopped."""
        return self._running.get(request_id) is asyncio.current_task()

    async def _fail(self, request_id: RequestId, error: ServerError) -> None:
        if not self._is_current(request_id):
            return
        failure = _failure(error)
        answered = failure.invalid or isinstance(error, ServerRefused)
        if not answered and not await self._is_alive():
            return  # its workers leave, and all their requests are tried again
        self._listener.on_failure(request_id, failure)


def _failure(error: ServerError) -> StreamFailure:
    """Describe an error; a client gets the text of one that is the request's own, without URLs."""
    match error:
        case NotServable(field=name, reason=reason):
            text, invalid = f"{name}: {reason}", True
        case ServerRefused(invalid=True, message=message):
            text, invalid = message, True
        case _:
            text, invalid = str(error), False
    return StreamFailure(text[:_MAX_REASON], not invalid, invalid)
