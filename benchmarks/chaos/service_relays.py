"""Relay all connections between services; delay, throttle, hold, cut and damage them as told.

A service listens at one loopback address and advertises another one. Here is a relay at each port
of the latter, as soon as the service listens at the same port of the former. So other services
reach it through the relay alone: its commands and events (ZeroMQ) and its transfers (TCP). Bytes
stay in order and none is lost, as TCP promises: lost packets are seen above it as a pause.
"""

import asyncio
import contextlib
import math
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.chaos.listening_ports import listening_ports, owner_of

_T = TypeVar("_T")
#: Bytes read at once, and chunks that are under way in one direction at the most.
_CHUNK, _CHUNKS_UNDER_WAY = 64 * 1024, 64
#: Seconds between two looks for ports.
_LOOK_S = 0.1
#: First byte of a ZeroMQ connection in each direction.
_ZMQ_GREETING = b"\xff"
#: Option of a socket whose close is a reset: it lingers for 0 s.
_RESETS = struct.pack("ii", 1, 0)
#: Seconds that the relays may take to carry out an order.
_ORDER_S = 120.0
#: Seconds that connections may take to end when the relays do.
_ENDS_WITHIN_S = 10.0


@dataclass(frozen=True)
class Link:
    """Connections of one service, or those between two services."""

    one: str
    #: Name of the other service; empty: any.
    other: str = ""

    def has(self, source: str, target: str) -> bool:
        """Return whether a connection from `source` to `target` belongs to the link."""
        ends = {source, target}
        return self.one in ends and (not self.other or self.other in ends - {self.one})


@dataclass(frozen=True)
class LinkCondition:
    """What a link does to bytes."""

    #: Least and greatest seconds that a chunk is delayed, in each direction.
    delay_s: tuple[float, float] = (0.0, 0.0)
    bytes_per_s: float = math.inf
    #: Whether nothing passes, not even the end of a connection.
    holds: bool = False


def worst_of(conditions: Iterable[LinkCondition]) -> LinkCondition:
    """Return the condition of a link to which all of these apply."""
    worst = LinkCondition()
    for each in conditions:
        worst = LinkCondition(
            max(worst.delay_s, each.delay_s, key=sum),
            min(worst.bytes_per_s, each.bytes_per_s),
            worst.holds or each.holds,
        )
    return worst


@dataclass(eq=False)
class _Connection:
    """One connection through a relay."""

    source: str
    target: str
    writers: tuple[asyncio.StreamWriter, ...]
    #: Whether the next chunk of a transfer is damaged.
    is_to_damage: bool = False


class ServiceRelays:
    """The relays of all services, in a thread of their own; a context manager."""

    def __init__(
        self,
        hosts: Mapping[str, tuple[str, str]],
        pids: Callable[[], Mapping[str, int]],
        seed: int = 0,
    ) -> None:
        """Prepare the relays.

        Args:
            hosts: by service, the address at which it listens and the one that it advertises.
            pids: returns the process id of each service that runs.
            seed: of delays within their bounds.
        """
        self._hosts = hosts
        self._pids = pids
        self._dice = random.Random(seed)
        self._conditions: dict[Link, LinkCondition] = {}
        self._changed = asyncio.Event()
        self._connections: set[_Connection] = set()
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: What was relayed, cut and damaged.
        self.counts: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "ServiceRelays":
        self._thread.start()
        self._submit(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        self._submit(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def set(self, link: Link, condition: LinkCondition | None) -> None:
        """Set the condition of a link from now on; None lifts it."""
        self._submit(self._set(link, condition))

    def cut(self, link: Link) -> int:
        """Reset the connections of a link, and return their number; later ones are relayed."""
        return self._submit(self._cut(link))

    def damage(self, link: Link, *, damages: bool) -> None:
        """Invert one byte of the next chunk of each transfer connection of a link, or don't."""
        self._submit(self._damage(link, damages))

    def n_connections(self, link: Link) -> int:
        """Return the number of open connections of a link."""
        return sum(link.has(each.source, each.target) for each in tuple(self._connections))

    def _submit(self, order: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(order, self._loop).result(_ORDER_S)

    # -- in the thread of the relays ---------------------------------------------------------

    async def _begin(self) -> None:
        self._spawn(self._follow_ports())

    async def _end(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        for server in self._servers.values():
            server.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_ENDS_WITHIN_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow_ports(self) -> None:
        """Listen wherever a service does, and no longer than it."""
        bound = {listens: (name, relay) for name, (listens, relay) in self._hosts.items()}
        while True:
            ports = await asyncio.to_thread(listening_ports, frozenset(bound))
            for key in self._servers.keys() - ports:
                self._servers.pop(key).close()
            for host, port in ports - self._servers.keys():
                name, relay = bound[host]
                with contextlib.suppress(OSError):  # it is tried again
                    self._servers[host, port] = await asyncio.start_server(
                        self._handler(name, (host, port), (relay, port)), relay, port
                    )
            await asyncio.sleep(_LOOK_S)

    def _handler(
        self, target: str, address: tuple[str, int], relay: tuple[str, int]
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._spawn(self._relay(target, address, relay, reader, writer))

        return handle

    async def _relay(
        self,
        target: str,
        address: tuple[str, int],
        relay: tuple[str, int],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        near = writer.get_extra_info("peername")[:2]
        source = await asyncio.to_thread(owner_of, near, relay, self._pids())
        connection = _Connection(source, target, (writer,))
        self._connections.add(connection)
        try:
            await self._wait_until_open(connection)
            far_reader, far_writer = await asyncio.open_connection(*address)
            connection.writers = (writer, far_writer)
            self.counts["connections relayed"] += 1
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass_on(connection, reader, far_writer))
                tasks.create_task(self._pass_on(connection, far_reader, writer))
        except* OSError:
            pass  # one end is gone, and so is the other now
        finally:
            self._connections.discard(connection)
            for each in connection.writers:
                each.transport.abort()

    async def _pass_on(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass on one direction: read ahead of what is under way, and write when it is due."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS_UNDER_WAY)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(connection, reader, under_way))
            tasks.create_task(self._write(connection, writer, under_way))

    async def _read(
        self,
        connection: _Connection,
        reader: asyncio.StreamReader,
        under_way: "asyncio.Queue[tuple[float, bytes]]",
    ) -> None:
        is_zmq: bool | None = None
        due_s = 0.0
        data = b"-"
        while data:
            try:
                data = await reader.read(_CHUNK)
            except OSError:
                data = b""  # it is passed on as an end, in its turn
            if is_zmq is None:
                is_zmq = data.startswith(_ZMQ_GREETING)
            if data and connection.is_to_damage and not is_zmq:
                data = self._damaged(connection, data)
            delay_s = self._dice.uniform(*self._condition(connection).delay_s)
            due_s = max(due_s, self._loop.time() + delay_s)
            await under_way.put((due_s, data))

    async def _write(
        self,
        connection: _Connection,
        writer: asyncio.StreamWriter,
        under_way: "asyncio.Queue[tuple[float, bytes]]",
    ) -> None:
        while True:
            due_s, data = await under_way.get()
            if (delay_s := due_s - self._loop.time()) > 0:
                await asyncio.sleep(delay_s)
            await self._wait_until_open(connection)
            if not data:
                writer.write_eof()
                return
            await asyncio.sleep(len(data) / self._condition(connection).bytes_per_s)
            await self._wait_until_open(connection)
            self.counts["bytes relayed"] += len(data)
            writer.write(data)
            await writer.drain()

    def _condition(self, connection: _Connection) -> LinkCondition:
        return worst_of(
            condition
            for link, condition in self._conditions.items()
            if link.has(connection.source, connection.target)
        )

    async def _wait_until_open(self, connection: _Connection) -> None:
        while self._condition(connection).holds:
            await self._changed.wait()

    def _damaged(self, connection: _Connection, data: bytes) -> bytes:
        connection.is_to_damage = False
        self.counts["bytes damaged"] += 1
        at = self._dice.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]

    async def _set(self, link: Link, condition: LinkCondition | None) -> None:
        self._conditions.pop(link, None)
        if condition is not None:
            self._conditions[link] = condition
        self._changed.set()
        self._changed = asyncio.Event()

    async def _cut(self, link: Link) -> int:
        found = [each for each in self._connections if link.has(each.source, each.target)]
        for connection in found:
            for writer in connection.writers:
                end = writer.get_extra_info("socket")
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
                writer.transport.abort()
        self.counts["connections cut"] += len(found)
        return len(found)

    async def _damage(self, link: Link, damages: bool) -> None:
        for connection in self._connections:
            if link.has(connection.source, connection.target):
                connection.is_to_damage = damages
