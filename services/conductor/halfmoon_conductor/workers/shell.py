"""Drive the scheduling core: hand it one event at a time and carry out its commands.

The core decides; worker links reach the workers, the gateway reaches the clients. Every outcome of
a command comes back as a further event.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Protocol, assert_never

import structlog

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import Message
from halfmoon_runtime.clock import Clock
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
from halfmoon_scheduling.events import AnyEvent

log = structlog.get_logger()


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
            while self._events:
                event, now = self._events.popleft(), self.clock.now()
                commands = self.core.handle(event, now)
                for record in self._recorders:
                    record(now, event, commands)
                for command in commands:
                    self._perform(command)
        finally:
            self._draining = False

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
