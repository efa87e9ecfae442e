"""Join ports and links inside one process by queues, and inject faults on request.

Messages cross as encoded frames, as they would on a wire. The faults:

- `kill`: the port's process died. Messages that it had not read are lost. Its links deliver what
  they had received and then raise, as after a closed connection.
- `partition`: the port lives, but no caller reaches it. Its links are down on both sides (as
  after missed heartbeats) and new ones fail until `heal`.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence

from halfmoon_protocol.codec import MAX_MESSAGE_BYTES, decode, encode
from halfmoon_protocol.errors import MessageTooLarge, ProtocolError
from halfmoon_protocol.kv_events import KvEvent, KvEventBatch, decode_payload, encode_payload
from halfmoon_protocol.messages import AnyMessage, Message
from halfmoon_runtime.channels.backpressure import SendBackpressure
from halfmoon_runtime.channels.dropped_messages import drop_reason, record_drop
from halfmoon_runtime.channels.network import PeerId, PeerUnreachable
from halfmoon_runtime.channels.receive_queue import ReceiveQueue


class MemoryNetwork:
    """A `Network` inside one process: ports and links that share one reach each other.

    Args:
        inbox_messages: messages that a port holds before it refuses callers, and that a link
            holds before its port waits.
        unread_s: seconds after which a link that reads nothing goes down, as by heartbeats.
    """

    def __init__(self, *, inbox_messages: int = 1024, unread_s: float = 3.0) -> None:
        self.inbox_messages = inbox_messages
        self.unread_s = unread_s
        self._ports: dict[str, MemoryPort] = {}
        self._partitioned: set[str] = set()
        self._serial = itertools.count()

    async def bind(self, name: str, *, host: str = "127.0.0.1") -> "MemoryPort":
        """See `Network.bind`. A name bound again is another port: a restarted worker."""
        port = MemoryPort(self, name, f"mem://{name}/{next(self._serial)}")
        self._ports[port.commands] = self._ports[port.events] = port
        return port

    async def dial(
        self, commands: str, events: str | None = None, *, key_id: str = ""
    ) -> "MemoryLink":
        """See `Network.dial`. The link is down from the start if there is no such port."""
        link = MemoryLink(self, PeerId(next(self._serial).to_bytes(5, "big")), commands)
        port = self._reachable(commands)
        publisher = self._reachable(events) if events is not None else None
        if port is None or (events is not None and publisher is None):
            link.break_off(f"no answer at {commands if port is None else events}")
        else:
            link.join(port, publisher)
        return link

    async def close(self) -> None:
        """See `Network.close`."""
        for port in self._distinct_ports():
            await port.close()

    def kill(self, name: str) -> None:
        """Kill the process that bound `name`."""
        for port in self._distinct_ports(name):
            port.stop(f"{name} was killed", discard=True)

    def partition(self, name: str) -> None:
        """Cut `name` off from all its callers, until `heal`."""
        self._partitioned.add(name)
        for port in self._distinct_ports(name):
            port.close_links(f"{name} stopped answering heartbeats")

    def heal(self, name: str) -> None:
        """Let new links reach `name` again."""
        self._partitioned.discard(name)

    def forget(self, port: "MemoryPort") -> None:
        """Remove a port that stops, so that no caller finds it."""
        self._ports.pop(port.commands, None)
        self._ports.pop(port.events, None)

    def check(self) -> None:
        """Assert that ports and links know of each other."""
        for port in self._distinct_ports():
            port.check()

    def _reachable(self, endpoint: str) -> "MemoryPort | None":
        port = self._ports.get(endpoint)
        return None if port is None or port.name in self._partitioned else port

    def _distinct_ports(self, name: str | None = None) -> "list[MemoryPort]":
        ports = dict.fromkeys(self._ports.values())
        return [port for port in ports if name is None or port.name == name]


class MemoryPort:
    """A `Port` of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, name: str, base: str) -> None:
        self.name = name
        self._network = network
        self._base = base
        self._inbox: ReceiveQueue[tuple[PeerId, AnyMessage]] = ReceiveQueue(network.inbox_messages)
        #: Connected callers. `listeners` also receive published messages.
        self.peers: dict[PeerId, MemoryLink] = {}
        self.listeners: dict[PeerId, MemoryLink] = {}
        self._turns = SendBackpressure()
        self._kv_sequence = 0

    @property
    def commands(self) -> str:
        """See `Port.commands`."""
        return f"{self._base}/commands"

    @property
    def events(self) -> str:
        """See `Port.events`."""
        return f"{self._base}/events"

    @property
    def key_id(self) -> str:
        """See `Port.key_id`."""
        return ""

    async def receive(self) -> tuple[PeerId, AnyMessage]:
        """See `Port.receive`."""
        return await self._inbox.get()

    async def send(self, peer: PeerId, message: Message) -> None:
        """See `Port.send`."""
        arriving = _read(encode(message), self.commands)
        if arriving is None:
            return
        try:
            async with asyncio.timeout(self._network.unread_s):
                await self._turns.send(peer, lambda: self._offer(peer, arriving))
        except TimeoutError:
            if (link := self.peers.get(peer)) is not None:
                link.break_off(f"{self.name} was not read for {self._network.unread_s} s")
            raise PeerUnreachable(f"{self.name}: caller {peer.hex()} reads nothing") from None

    async def publish(self, message: Message) -> None:
        """See `Port.publish`."""
        if (arriving := _read(encode(message), self.events)) is not None:
            self._publish(arriving)

    async def publish_kv(self, events: Sequence[KvEvent]) -> int:
        """See `Port.publish_kv`."""
        payload = encode_payload(events, time.time())
        if len(payload) > MAX_MESSAGE_BYTES:
            raise MessageTooLarge(f"KV events of {len(payload)} bytes are over {MAX_MESSAGE_BYTES}")
        sequence = self._kv_sequence
        self._kv_sequence += 1
        self._publish(decode_payload(payload, sequence))
        return sequence

    async def close(self) -> None:
        """See `Port.close`."""
        self.stop(f"{self.name} closed its port")

    def take(self, peer: PeerId, message: AnyMessage) -> bool:
        """Queue a command that arrives; return False when the queue is full."""
        return self._inbox.try_put((peer, message))

    def stop(self, reason: str, *, discard: bool = False) -> None:
        """Close the port; `discard` drops the messages that were not read yet."""
        self._network.forget(self)
        self.close_links(reason)
        self._inbox.close(reason, discard=discard)

    def close_links(self, reason: str) -> None:
        """Take down every link to this port."""
        for link in [*self.peers.values(), *self.listeners.values()]:
            link.break_off(reason)

    def check(self) -> None:
        """Assert that every link that this port sends to is up."""
        assert not any(link.is_down for link in [*self.peers.values(), *self.listeners.values()])

    def _offer(self, peer: PeerId, message: AnyMessage) -> bool:
        link = self.peers.get(peer)
        if link is None:
            raise PeerUnreachable(f"{self.name}: caller {peer.hex()} is gone")
        return link.deliver(message)

    def _publish(self, message: AnyMessage | KvEventBatch) -> None:
        for link in self.listeners.values():
            if not link.deliver(message):
                record_drop(
                    "queue_full", self.events, f"a listener missed a {type(message).__name__}"
                )


class MemoryLink:
    """A `WorkerLink` of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, peer: PeerId, endpoint: str) -> None:
        self._peer = peer
        self._endpoint = endpoint
        self._inbox: ReceiveQueue[AnyMessage | KvEventBatch] = ReceiveQueue(network.inbox_messages)
        self._port: MemoryPort | None = None
        self._publisher: MemoryPort | None = None
        #: Reason why the link is down; None while it is up.
        self._down: str | None = None

    @property
    def is_down(self) -> bool:
        """True once the link is down, for good."""
        return self._down is not None

    async def send(self, message: Message) -> None:
        """See `WorkerLink.send`."""
        self.send_now(message)

    def send_now(self, message: Message) -> None:
        """See `WorkerLink.send_now`."""
        frame = encode(message)
        if self._port is None:
            raise PeerUnreachable(f"{self._endpoint}: {self._down}")
        message_read = _read(frame, self._endpoint)
        if message_read is not None and not self._port.take(self._peer, message_read):
            raise PeerUnreachable(f"{self._endpoint}: its queue is full")

    async def receive(self) -> AnyMessage | KvEventBatch:
        """See `WorkerLink.receive`."""
        return await self._inbox.get()

    async def close(self) -> None:
        """See `WorkerLink.close`."""
        self.break_off("we hung up")

    def join(self, port: MemoryPort, publisher: MemoryPort | None) -> None:
        """Connect to a port, and to what it publishes if `publisher` is set."""
        self._port, self._publisher = port, publisher
        port.peers[self._peer] = self
        if publisher is not None:
            publisher.listeners[self._peer] = self

    def deliver(self, message: AnyMessage | KvEventBatch) -> bool:
        """Queue an answer or publication that arrives; return False when the queue is full."""
        return self._inbox.try_put(message)

    def break_off(self, reason: str) -> None:
        """Go down. Messages that arrived before can still be received."""
        if self._down is None:
            self._down = reason
        if self._port is not None:
            self._port.peers.pop(self._peer, None)
        if self._publisher is not None:
            self._publisher.listeners.pop(self._peer, None)
        self._port = self._publisher = None
        self._inbox.close(f"{self._endpoint}: {reason}")


def _read(frame: bytes, where: str) -> AnyMessage | None:
    """Decode a frame as its receiver does; return None if the receiver drops it."""
    try:
        return decode(frame)
    except ProtocolError as error:
        record_drop(drop_reason(error), where, error)
        return None
