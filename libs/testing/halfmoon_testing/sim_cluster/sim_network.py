"""Carry messages between simulated processes, late and with faults.

Like ZeroMQ over TCP: messages of one connection arrive in order and at most once, and those of
different connections in any order. A connection that breaks loses what is under way. A cut holds
messages back; after `HEARTBEAT_S` each side takes its end down. A published message may be missed.
"""

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from halfmoon_protocol.codec import MAX_MESSAGE_BYTES, decode, encode
from halfmoon_protocol.errors import MessageTooLarge
from halfmoon_protocol.kv_events import KvEvent, KvEventBatch, decode_payload, encode_payload
from halfmoon_protocol.messages import AnyMessage, Message
from halfmoon_runtime.channels.network import PeerId, PeerUnreachable
from halfmoon_runtime.channels.receive_queue import ReceiveQueue
from halfmoon_testing.sim_cluster.virtual_loop import VirtualLoop, VirtualProcess

#: Seconds without an answer after which a side takes a connection down.
HEARTBEAT_S = 3.0
#: Messages that a side holds unread.
_QUEUE = 1024


@dataclass
class NetworkFaults:
    """State what goes wrong now, beside cuts."""

    #: Seconds of a message under way, at the least and at the most.
    delay_s: tuple[float, float] = (0.0001, 0.002)
    #: Share of published messages that a listener misses.
    missed_rate: float = 0.0


class SimNetwork:
    """All connections of one cluster."""

    def __init__(
        self, loop: VirtualLoop, dice: random.Random, log: Callable[[str, str], None]
    ) -> None:
        """Connect nothing yet.

        Args:
            loop: delivers.
            dice: draws delays and losses.
            log: gets the receiver and a text of each message that arrives.
        """
        self.loop = loop
        self.dice = dice
        self.log = log
        self.faults = NetworkFaults()
        self.endpoints: dict[str, SimPort] = {}
        self.connections: list[Connection] = []
        #: Pairs of processes that do not reach each other.
        self._cuts: set[tuple[str, str]] = set()
        self.serial = itertools.count()
        self.n_delivered = 0

    def view(self, process: VirtualProcess, wall_clock: Callable[[], float]) -> "ProcessNetwork":
        """Return the network as one process uses it."""
        return ProcessNetwork(self, process, wall_clock)

    def is_cut(self, one: str, other: str) -> bool:
        """Return whether these two do not reach each other."""
        return _pair(one, other) in self._cuts

    def cut(self, one: str, other: str) -> None:
        """Hold back all that these two send to each other, until `heal`."""
        pair = _pair(one, other)
        if pair in self._cuts:
            return
        self._cuts.add(pair)
        for each in self.connections:
            if each.joins(pair):
                self.loop.call_later(
                    HEARTBEAT_S, each.end_if_silent, context=self.loop.outside.context
                )

    def heal(self, one: str, other: str) -> None:
        """Deliver what was held back."""
        pair = _pair(one, other)
        self._cuts.discard(pair)
        for each in list(self.connections):
            if each.joins(pair):
                each.release()

    def on_paused(self, process: VirtualProcess, seconds: float) -> None:
        """Take down the connections of a process that stands still for too long."""
        if seconds < HEARTBEAT_S:
            return
        for each in [c for c in self.connections if c.touches(process)]:
            for end in each.ends:
                late_s = seconds if end.process is process else HEARTBEAT_S
                self.loop.call_later(
                    late_s, end.on_down, "no heartbeats", context=end.process.context
                )

    def on_killed(self, process: VirtualProcess) -> None:
        """Close the connections of a dead process, as its system does."""
        for endpoint in [e for e, port in self.endpoints.items() if port.process is process]:
            del self.endpoints[endpoint]
        for each in [c for c in self.connections if c.touches(process)]:
            each.hang_up(process, f"{process} is gone")

    def delay(self) -> float:
        """Draw the seconds of one message."""
        return self.dice.uniform(*self.faults.delay_s)


@dataclass(eq=False)
class _End:
    """One side of a connection."""

    process: VirtualProcess
    on_down: Callable[[str], None]
    #: When the latest message for this side arrives.
    last_s: float = 0.0
    #: What was sent to it and is not delivered, in order, whatever stands still meanwhile.
    coming: deque[Callable[[], None]] = field(default_factory=deque)
    #: How many of them would have arrived, if no cut held them back.
    n_held: int = 0


class Connection:
    """Carry messages between a link and a port."""

    def __init__(self, network: SimNetwork, dialler: _End, port: _End) -> None:
        """Connect two sides."""
        self._network = network
        self.ends = (dialler, port)
        self.is_over = False
        network.connections.append(self)

    def joins(self, pair: tuple[str, str]) -> bool:
        """Return whether it is between these two processes."""
        return _pair(self.ends[0].process.name, self.ends[1].process.name) == pair

    def touches(self, process: VirtualProcess) -> bool:
        """Return whether the process has one of its ends."""
        return any(end.process is process for end in self.ends)

    def send(self, to: _End, deliver: Callable[[], None]) -> None:
        """Deliver at the other side, after all that was sent to it before."""
        network = self._network
        to.last_s = max(to.last_s, network.loop.time() + network.delay())
        to.coming.append(deliver)
        network.loop.call_at(to.last_s, self._arrive, to, context=to.process.context)

    def hang_up(self, by: VirtualProcess, reason: str) -> None:
        """Tell the other side that this one is gone, after what was sent before."""
        if self.is_over:
            return
        self.is_over = True
        for end in self.ends:
            if end.process is not by:
                self.send(end, lambda end=end: end.on_down(reason))  # type: ignore[misc]
        if not self._is_cut:
            self._forget_if_over()

    def end_if_silent(self) -> None:
        """Take both sides down if the cut is still there."""
        if self._is_cut:
            self.is_over = True
            for end in self.ends:
                end.coming.clear()
                end.n_held = 0
                self._network.loop.call_soon(
                    end.on_down, "no heartbeats", context=end.process.context
                )
            self._forget_if_over()

    def release(self) -> None:
        """Deliver what was held back at once."""
        for end in self.ends:
            n_held, end.n_held = end.n_held, 0
            for _ in range(n_held):
                self._network.loop.call_soon(self._arrive, end, context=end.process.context)
        self._forget_if_over()

    @property
    def _is_cut(self) -> bool:
        return self._network.is_cut(self.ends[0].process.name, self.ends[1].process.name)

    def _arrive(self, to: _End) -> None:
        if self._is_cut:
            to.n_held += 1
            if self.is_over and self not in self._network.connections:
                self._network.connections.append(self)  # it has yet to say that it is gone
        elif to.coming:
            to.coming.popleft()()

    def _forget_if_over(self) -> None:
        if self.is_over and self in self._network.connections:
            self._network.connections.remove(self)


class ProcessNetwork:
    """A `Network` as one process uses it."""

    def __init__(
        self, network: SimNetwork, process: VirtualProcess, wall_clock: Callable[[], float]
    ) -> None:
        """Connect nothing yet."""
        self.network = network
        self.process = process
        self.wall_clock = wall_clock

    async def bind(self, name: str, *, host: str = "127.0.0.1") -> "SimPort":
        """See `Network.bind`."""
        port = SimPort(self, f"sim://{name}/{next(self.network.serial)}")
        self.network.endpoints[port.commands] = self.network.endpoints[port.events] = port
        return port

    async def dial(
        self, commands: str, events: str | None = None, *, key_id: str = ""
    ) -> "SimLink":
        """See `Network.dial`."""
        network = self.network
        await asyncio.sleep(network.delay())
        link = SimLink(self, PeerId(next(network.serial).to_bytes(5, "big")), commands)
        port = network.endpoints.get(commands)
        if port is None or network.is_cut(self.process.name, port.process.name):
            link.on_down(f"no answer at {commands}")
        else:
            link.join(port, listens=events is not None)
        return link

    async def close(self) -> None:
        """See `Network.close`."""


class SimPort:
    """A `Port` of a simulated process."""

    def __init__(self, view: ProcessNetwork, base: str) -> None:
        """Have no callers yet."""
        self.process = view.process
        self._network = view.network
        self._wall_clock = view.wall_clock
        self._base = base
        self._inbox: ReceiveQueue[tuple[PeerId, AnyMessage]] = ReceiveQueue(_QUEUE)
        self.peers: dict[PeerId, SimLink] = {}
        self.listeners: dict[PeerId, SimLink] = {}
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
        frame = encode(message)
        link = self.peers.get(peer)
        if link is None:
            raise PeerUnreachable(f"{self.process}: caller {peer.hex()} is gone")
        link.carry(decode(frame))

    async def publish(self, message: Message) -> None:
        """See `Port.publish`."""
        self._publish(decode(encode(message)))

    async def publish_kv(self, events: Sequence[KvEvent]) -> int:
        """See `Port.publish_kv`."""
        payload = encode_payload(events, self._wall_clock())
        if len(payload) > MAX_MESSAGE_BYTES:
            raise MessageTooLarge(f"KV events of {len(payload)} bytes are over {MAX_MESSAGE_BYTES}")
        sequence = self._kv_sequence
        self._kv_sequence += 1
        self._publish(decode_payload(payload, sequence))
        return sequence

    async def close(self) -> None:
        """See `Port.close`."""
        for endpoint in (self.commands, self.events):
            self._network.endpoints.pop(endpoint, None)
        for link in list(self.peers.values()):
            link.hang_up(self.process, f"{self.process} closed its port")
        self._inbox.close("closed")

    def take(self, peer: PeerId, message: AnyMessage) -> bool:
        """Queue a command that has arrived; return False if there is no room."""
        return self._inbox.try_put((peer, message))

    def drop(self, peer: PeerId) -> None:
        """Forget a caller that is gone."""
        self.peers.pop(peer, None)
        self.listeners.pop(peer, None)

    def _publish(self, message: AnyMessage | KvEventBatch) -> None:
        for link in list(self.listeners.values()):
            if self._network.dice.random() >= self._network.faults.missed_rate:
                link.carry(message)
            else:
                self._network.log(self.process.name, f"a listener misses {type(message).__name__}")


class SimLink:
    """A `WorkerLink` of a simulated process."""

    def __init__(self, view: ProcessNetwork, peer: PeerId, endpoint: str) -> None:
        """Belong to no port yet."""
        self._network = view.network
        self._process = view.process
        self._peer = peer
        self._endpoint = endpoint
        self._inbox: ReceiveQueue[AnyMessage | KvEventBatch] = ReceiveQueue(_QUEUE)
        self._port: SimPort | None = None
        self._connection: Connection | None = None
        self._down = ""

    def join(self, port: SimPort, *, listens: bool) -> None:
        """Connect to a port."""
        self._port = port
        self._connection = Connection(
            self._network,
            _End(self._process, self.on_down),
            _End(port.process, lambda _: port.drop(self._peer)),
        )
        port.peers[self._peer] = self
        if listens:
            port.listeners[self._peer] = self

    async def send(self, message: Message) -> None:
        """See `WorkerLink.send`."""
        self.send_now(message)

    def send_now(self, message: Message) -> None:
        """See `WorkerLink.send_now`."""
        frame = encode(message)
        connection, port = self._connection, self._port
        if self._down or connection is None or port is None:
            raise PeerUnreachable(f"{self._endpoint}: {self._down}")
        arriving = decode(frame)

        def deliver() -> None:
            if self._peer in port.peers:
                self._note(port.process, arriving)
                if not port.take(self._peer, arriving):
                    port.drop(self._peer)
                    self.hang_up(port.process, "its queue is full")

        connection.send(connection.ends[1], deliver)

    async def receive(self) -> AnyMessage | KvEventBatch:
        """See `WorkerLink.receive`."""
        return await self._inbox.get()

    async def close(self) -> None:
        """See `WorkerLink.close`."""
        self.break_off("we hung up")

    def break_off(self, reason: str) -> None:
        """See `WorkerLink.break_off`."""
        if not self._down:
            self.on_down(reason)
            self.hang_up(self._process, "the caller hung up")

    def hang_up(self, by: VirtualProcess, reason: str) -> None:
        """Close the connection from one side."""
        if self._connection is not None:
            self._connection.hang_up(by, reason)

    def carry(self, message: AnyMessage | KvEventBatch) -> None:
        """Deliver an answer or a publication after the time that it takes."""
        if self._connection is None:
            return

        def deliver() -> None:
            if not self._down:
                self._note(self._process, message)
                if not self._inbox.try_put(message):
                    self.break_off("it reads nothing")

        self._connection.send(self._connection.ends[0], deliver)

    def on_down(self, reason: str) -> None:
        """Go down. What has arrived can still be received."""
        if not self._down:
            self._down = reason
            self._inbox.close(f"{self._endpoint}: {reason}")

    def _note(self, receiver: VirtualProcess, message: AnyMessage | KvEventBatch) -> None:
        self._network.n_delivered += 1
        self._network.log(receiver.name, f"receives {type(message).__name__}")


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)
