"""Define the channels between services: ports that workers bind, links that callers dial.

A worker *binds* a `Port`: a socket for commands and their answers, and a socket for published
events. A caller (a conductor, or a prefill worker at a kvstore) *dials* the port and holds a
`WorkerLink`. So there may be any number of callers, and a worker can be written in any language.
`zmq_network` uses ZeroMQ; `memory_network` keeps the same contract inside one process. One
conformance suite runs on both.

Garbage on a socket (unknown version, too large, not a message) is logged, counted and dropped
below this interface: `receive` returns messages only. Nothing that reads a socket can be cancelled
in the middle of a read.
"""

from collections.abc import Sequence
from typing import NewType, Protocol

from halfmoon_protocol.kv_events import KvEvent, KvEventBatch
from halfmoon_protocol.messages import AnyMessage, Message

#: Names one caller of a port; valid until its link is down.
PeerId = NewType("PeerId", bytes)


class PeerUnreachable(Exception):
    """The peer is gone or accepts no more messages; the text names the peer and the reason."""


class Port(Protocol):
    """A worker's side of its channels: receive commands, answer them, publish events."""

    @property
    def commands(self) -> str:
        """Endpoint to give to callers for commands."""
        ...

    @property
    def events(self) -> str:
        """Endpoint to give to callers for events."""
        ...

    @property
    def key_id(self) -> str:
        """Id of the cluster key that the port serves with, for callers; empty: there is none."""
        ...

    async def receive(self) -> tuple[PeerId, AnyMessage]:
        """Return the next command and its sender. Cancelling this call loses nothing.

        Raises:
            PeerUnreachable: the port is closed, and all earlier messages are received.
        """
        ...

    async def send(self, peer: PeerId, message: Message) -> None:
        """Answer one caller; wait while its queue is full.

        Answers to the same caller keep the order of their calls.

        Raises:
            PeerUnreachable: the caller is gone, or read nothing for so long that it counts as
                gone, and its link is down; or the port is closed.
            MessageTooLarge: the message would be dropped; nothing was sent.
        """
        ...

    async def publish(self, message: Message) -> None:
        """Publish a message to all callers that listen; a slow caller may miss it.

        Raises:
            PeerUnreachable: the port is closed.
            MessageTooLarge: the message would be dropped; nothing was sent.
        """
        ...

    async def publish_kv(self, events: Sequence[KvEvent]) -> int:
        """Publish KV events in vLLM's frames, and return their sequence number.

        Sequence numbers start at 0 with each port and have no gaps.

        Raises:
            PeerUnreachable: the port is closed.
            MessageTooLarge: publish fewer events at a time; no number was used up.
        """
        ...

    async def close(self) -> None:
        """Close the port; messages still queued are dropped after a short linger."""
        ...


class WorkerLink(Protocol):
    """A caller's connection to one worker."""

    def send_now(self, message: Message) -> None:
        """Send a command; raise as `send`."""
        ...

    def break_off(self, reason: str) -> None:
        """Take the link down for good; the first reason stays."""
        ...

    async def send(self, message: Message) -> None:
        """Send a command.

        Raises:
            PeerUnreachable: the link is down, or its queue is full.
            MessageTooLarge: the message would be dropped; nothing was sent.
        """
        ...

    async def receive(self) -> AnyMessage | KvEventBatch:
        """Return the next answer or published event. Cancelling this call loses nothing.

        Raises:
            PeerUnreachable: the worker is gone (its process died, it stopped answering
                heartbeats, or it was never there); the link stays down from then on.
        """
        ...

    async def close(self) -> None:
        """Close the link."""
        ...


class Network(Protocol):
    """Bind ports and dial links: over ZeroMQ, or in memory."""

    async def bind(self, name: str, *, host: str = "127.0.0.1") -> Port:
        """Open a port on a free TCP port of `host`."""
        ...

    async def dial(
        self, commands: str, events: str | None = None, *, key_id: str = ""
    ) -> WorkerLink:
        """Connect to a worker; without `events` only answers are received.

        Args:
            commands: the port's endpoint for commands.
            events: the port's endpoint for events.
            key_id: the `Port.key_id`, from the worker's record or address; empty: not said there.

        Return when the link is up or known to be down: no worker answered within the connect
        timeout, its key is none of ours, or the endpoint is invalid. This call raises nothing;
        `receive` and `send` of the link do. Events published in the first moments may be missed.
        """
        ...

    async def close(self) -> None:
        """Close all ports and links that are still open."""
        ...
