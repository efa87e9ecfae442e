"""Drive the scheduling core: hand it one event at a time and carry out its commands.

The core decides; worker links reach the workers, the gateway reaches the clients. Every outcome of
a command comes back as a further event.

An exception ends the request whose event it was, wherever the event was posted. Then the core
audits itself. A core that fails its audit decides nothing right any more: `broken` is set, and the
process ends.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Protocol, assert_never

import structlog

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import Message
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.worker.message_loop import FAILED_MESSAGES
from halfmoon_scheduling.commands import (
    AnyCommand,
    Deliver,
    Fail,
    RefuseWorker,
    Reject,
    Resubmit,
    Send,
)
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.events import (
    AnyEvent,
    MessageReceived,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestProgressed,
)

log = structlog.get_logger()

#: Events that the log tells of a core that is broken.
_N_TOLD = 32


class CoreBroken(Exception):
    """The core failed its audit; the log has the story."""


class WorkerPort(Protocol):
    """Send messages to workers for the shell."""

    def send(self, worker_id: WorkerId, message: Message) -> None:
        """Queue a message. A failure to send it comes back as `WorkerLost`."""
        ...

    def refuse(self, worker_id: WorkerId, reason: str) -> None:
        """Tell a worker that it can't be used, and close its link."""
        ...


class ClientPort(Protocol):
    """Reach clients for the shell."""

    def deliver(self, request_id: RequestId, token: int, finish: str, n_cached: int = 0) -> bool:
        """Hand a token to the client; return whether the request still wants tokens."""
        ...

    def reject(self, command: Reject) -> None:
        """Refuse a request."""
        ...

    def resubmit(self, command: Resubmit) -> None:
        """Start the next try from the tokens delivered so far."""
        ...

    def fail(self, command: Fail) -> None:
        """End a request with an error."""
        ...


Recorder = Callable[[float, AnyEvent, list[AnyCommand]], None]


class Shell:
    """Feed the core with events and carry out its commands. Use it from one event loop."""

    def __init__(
        self, core: Conductor, clock: Clock, *, recorders: Sequence[Recorder] = ()
    ) -> None:
        """Create a shell; call `connect` before the first event.

        Args:
            core: makes the decisions.
            clock: gives each event its time.
            recorders: each is called with every event, its time and the resulting commands, before
                these are carried out.
        """
        self.core = core
        self.clock = clock
        self._recorders = list(recorders)
        self._events: deque[AnyEvent] = deque()
        self._draining = False
        #: Has no client's ids: events of one request are handled in the task of another.
        self._context = copy_context()
        #: The latest events, the newest last.
        self._latest: deque[AnyEvent] = deque(maxlen=_N_TOLD)
        #: Set when the core has failed its audit.
        self.broken = asyncio.Event()
        #: Events that ended in an exception.
        self.n_failures = 0
        self._workers: WorkerPort
        self._clients: ClientPort

    def connect(self, workers: WorkerPort, clients: ClientPort) -> None:
        """Set what carries out commands; once, before the first event."""
        self._workers = workers
        self._clients = clients

    def add_recorder(self, recorder: Recorder) -> None:
        """Call one more recorder from now on. It must be quick and change nothing."""
        self._recorders.append(recorder)

    def post(self, event: AnyEvent) -> None:
        """Let the core handle an event, after all events posted before.

        May be called while commands are carried out: the event is queued.
        """
        self._events.append(event)
        if self._draining:
            return
        self._draining = True
        try:
            while self._events and not self.broken.is_set():
                self._handle(self._events.popleft())
        finally:
            self._draining = False

    async def until_broken(self) -> None:
        """Wait until the core has failed its audit.

        Raises:
            CoreBroken: it has.
        """
        await self.broken.wait()
        raise CoreBroken("the scheduling core failed its audit, see the log")

    def _handle(self, event: AnyEvent) -> None:
        now = self.clock.now()
        self._latest.append(event)
        try:
            commands = self.core.handle(event, now)
            for record in self._recorders:
                record(now, event, commands)
        except Exception:
            self._on_failure(event, _request_of(event))
            return
        for command in commands:
            try:
                self._perform(command)
            except Exception:
                about = command.message if isinstance(command, Send) else command
                self._on_failure(event, getattr(about, "request_id", None))

    def _on_failure(self, event: AnyEvent, request_id: RequestId | None) -> None:
        """End a request at whose event there was an exception, and audit the core."""
        self.n_failures += 1
        FAILED_MESSAGES.labels(_type_name(event)).inc()
        self._log(log.exception, "core_failed", event_type=_name(event), request_id=request_id)
        try:
            self.core.check()
        except Exception:
            latest = [f"{_name(each)} {_request_of(each) or ''}".strip() for each in self._latest]
            self._log(log.exception, "core_broken", latest_events=latest)
            self.broken.set()
        if request_id is None or isinstance(event, RequestCancelled):
            return
        reason = "the conductor failed with this request; its log says how"
        self._clients.fail(Fail(request_id=request_id, reason=reason))
        self._events.append(RequestCancelled(request_id))

    def _perform(self, command: AnyCommand) -> None:
        match command:
            case Send(worker_id=worker_id, message=message):
                self._workers.send(worker_id, message)
            case Deliver(request_id=request_id, token=token, finish=finish, n_cached=n_cached):
                self._clients.deliver(request_id, token, finish, n_cached)
            case Reject():
                self._clients.reject(command)
            case Resubmit(request_id=request_id, reason=reason):
                self._log(log.info, "request_retried", request_id=request_id, reason=reason)
                self._clients.resubmit(command)
            case Fail(request_id=request_id, reason=reason):
                self._log(log.warning, "request_failed", request_id=request_id, reason=reason)
                self._clients.fail(command)
            case RefuseWorker(worker_id=worker_id, reason=reason):
                self._log(log.error, "worker_refused", worker_id=worker_id, reason=reason)
                self._workers.refuse(worker_id, reason)
            case _:
                assert_never(command)

    def _log(self, write: Callable[..., object], event: str, **fields: object) -> None:
        """Log a line without the ids of the request whose task runs now."""
        self._context.run(lambda: write(event, **fields))


def _name(event: AnyEvent) -> str:
    sender = f" from {event.worker_id}" if isinstance(event, MessageReceived) else ""
    return _type_name(event) + sender


def _type_name(event: AnyEvent) -> str:
    """Return the type of an event, or of the message that it is."""
    return type(event.message if isinstance(event, MessageReceived) else event).__name__


def _request_of(event: AnyEvent) -> RequestId | None:
    """Return the id of the request that an event is about, if it is about one."""
    match event:
        case RequestArrived(request=request):
            return request.request_id
        case RequestCancelled() | RequestProgressed() | RequestFinished():
            return event.request_id
        case MessageReceived(message=message):
            found: RequestId | None = getattr(message, "request_id", None)
            return found
    return None
