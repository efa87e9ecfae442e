"""Around the scheduling core: events in, one at a time, and commands carried out.

The core decides; the hub reaches workers, the gateway reaches clients. Whatever carrying out
a command leads to comes back as a further event.
"""

from collections import deque
from collections.abc import Callable, Sequence
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
    """What the shell asks of the hub."""

    def send(self, worker_id: WorkerId, message: Message) -> None:
        """Queue a message; that it can't be sent comes back as `WorkerLost`."""
        ...

    def refuse(self, worker_id: WorkerId, reason: str) -> None:
        """Tell a worker that it can't be used, and hang up."""
        ...


class ClientPort(Protocol):
    """What the shell asks of the gateway."""

    def deliver(self, request_id: RequestId, token: int, finish: str, n_cached: int = 0) -> bool:
        """Hand a token to the client; whether anybody still waits for it."""
        ...

    def reject(self, command: Reject) -> None:
        """Refuse a request."""
        ...

    def resubmit(self, command: Resubmit) -> None:
        """Start the next try, with what was delivered so far."""
        ...

    def fail(self, command: Fail) -> None:
        """End a request with an error."""
        ...


Recorder = Callable[[float, AnyEvent, list[AnyCommand]], None]


class Shell:
    """Feeds the core. Used from one event loop."""

    def __init__(
        self, core: Conductor, clock: Clock, *, recorders: Sequence[Recorder] = ()
    ) -> None:
        """A shell without hands: see `connect`.

        Args:
            core: decides.
            clock: says when.
            recorders: each is told of every event, its time, and the commands that it led to,
                before these are carried out.
        """
        self.core = core
        self.clock = clock
        self._recorders = list(recorders)
        self._events: deque[AnyEvent] = deque()
        self._draining = False
        self._workers: WorkerPort
        self._clients: ClientPort

    def connect(self, workers: WorkerPort, clients: ClientPort) -> None:
        """Say who carries out commands; once, before the first event."""
        self._workers = workers
        self._clients = clients

    def watch(self, recorder: Recorder) -> None:
        """Tell one more of everything from now on; it must be quick, and change nothing."""
        self._recorders.append(recorder)

    def post(self, event: AnyEvent) -> None:
        """Let the core handle an event, after those posted before.

        May be called while commands are carried out: the event waits its turn.
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
                log.info("request_placed_again", request_id=request_id, reason=reason)
                self._clients.resubmit(command)
            case Fail(request_id=request_id, reason=reason):
                log.warning("request_failed", request_id=request_id, reason=reason)
                self._clients.fail(command)
            case RefuseWorker(worker_id=worker_id, reason=reason):
                log.error("worker_refused", worker_id=worker_id, reason=reason)
                self._workers.refuse(worker_id, reason)
            case _:
                assert_never(command)
