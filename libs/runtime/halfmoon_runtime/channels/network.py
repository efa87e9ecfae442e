"""Channels between services: what a worker binds and what its callers dial.

A worker *binds* a `Port`: a socket for commands, answered to whoever asked, and one for
events, published to whoever listens. A conductor (or a prefill worker, at a kvstore) *dials*
it and holds a `WorkerLink`. So there may be any number of callers, and a worker can be written in
any language. `zmq_network` is the real thing, `memory_network` the same contract inside one
process; one conformance suite runs on both.

Garbage on a socket (unknown version, too large, not a message) is logged, counted and dropped
below this interface: `receive` yields messages only. One task reads each socket and is never
cancelled in the middle of a read.
"""

from collections.abc import Sequence
from typing import NewType, Protocol

from halfmoon_protocol.kv_events import KvEvent, KvEventBatch
from halfmoon_protocol.messages import AnyMessage, Message

#: One caller of a port, valid until its link is gone.
PeerId = NewType("PeerId", bytes)


class PeerUnreachable(Exception):
    """The other side is gone or takes nothing more: its text says who and why."""


class Port(Protocol):
    """A worker's side."""

    @property
    def commands(self) -> str:
        """Endpoint to give to callers for commands."""
        ...

    @property
    def events(self) -> str:
        """Endpoint to give to callers for events."""
        ...

    async def receive(self) -> tuple[PeerId, AnyMessage]:
        """The next command and who sent it. Cancelling this call loses nothing.

        Raises:
            PeerUnreachable: the port is closed, and what had come before is received.
        """
        ...

    async def send(self, peer: PeerId, message: Message) -> None:
        """Answer one caller; waits for one that is slower than its answers come.

        Answers to the same caller keep the order of their calls.

        Raises:
            PeerUnreachable: it is gone, or took nothing for so long that it counts as gone, and
                its link is down; or the port is closed.
            MessageTooLarge: it would be dropped; nothing was sent.
        """
        ...

    async def publish(self, message: Message) -> None:
        """Tell all callers that listen; a slow one may miss it.

        Raises:
            PeerUnreachable: the port is closed.
            MessageTooLarge: it would be dropped; nothing was sent.
        """
        ...

    async def publish_kv(self, events: Sequence[KvEvent]) -> int:
        """Tell all callers of KV events, in vLLM's frames; returns their sequence number.

        Sequence numbers start at 0 with each port and have no gaps.

        Raises:
            PeerUnreachable: the port is closed.
            MessageTooLarge: publish fewer events at a time; no number was used up.
        """
        ...

    async def close(self) -> None:
        """Stop; messages still queued are dropped after a short linger."""
        ...


class WorkerLink(Protocol):
    """A caller's side: one connection to one worker."""

    async def send(self, message: Message) -> None:
        """Send a command.

        Raises:
            PeerUnreachable: the link is down, or its queue is full.
            MessageTooLarge: it would be dropped; nothing was sent.
        """
        ...

    async def receive(self) -> AnyMessage | KvEventBatch:
        """The next answer or published event. Cancelling this call loses nothing.

        Raises:
            PeerUnreachable: the worker is gone (its process died, it stopped answering
                heartbeats, or it was never there); the link stays down from then on.
        """
        ...

    async def close(self) -> None:
        """Hang up."""
        ...


class Network(Protocol):
    """How ports are bound and links dialled: ZeroMQ, or memory."""

    async def bind(self, name: str, *, host: str = "127.0.0.1") -> Port:
        """Open a port on a free TCP port of `host`."""
        ...

    async def dial(self, commands: str, events: str | None = None) -> WorkerLink:
        """Connect to a worker; without `events` only answers are received.

        Returns when the link is up, or known to be down (there is nobody within the connect
        timeout, or the endpoint is none): it raises nothing, the link's `receive` and `send`
        do. What is published in the first moments may be missed.
        """
        ...

    async def close(self) -> None:
        """Close whatever is still open."""
        ...
