"""Follow one server's KV events over connections that come and go."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import structlog

from halfmoon_protocol.errors import MalformedMessage
from halfmoon_servers.kv_events.event_connection import (
    ConnectionDown,
    ConnectionUp,
    EventConnection,
    Published,
    Replayed,
    ReplayEnded,
)
from halfmoon_servers.kv_events.event_endpoint import EventEndpoint
from halfmoon_servers.kv_events.payload_decoder import decode_server_payload
from halfmoon_servers.kv_events.sequence_tracker import (
    ApplyBatch,
    AskReplay,
    ResetCache,
    SequenceTracker,
    Step,
)
from halfmoon_servers.kv_events.server_events import ServerEvent

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class SourceLimits:
    """Bounds of one server's event stream."""

    connect_timeout_s: float = 5.0
    #: Between the end of a connection and the next one.
    reconnect_s: float = 0.5
    #: Without a batch, after which a replay is given up.
    replay_timeout_s: float = 10.0
    #: Between the begins of two replays: a server whose numbers never fit costs no more.
    replay_interval_s: float = 1.0
    max_replay_batches: int = 200_000
    max_replay_bytes: int = 2**29


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Events of the server, in order."""

    events: tuple[ServerEvent, ...]


@dataclass(frozen=True, slots=True)
class CacheReset:
    """The server has restarted, and holds nothing of what it held."""


SourceItem = CacheEvents | CacheReset


@dataclass(slots=True)
class SourceCounts:
    """Count what a source has seen since it was opened."""

    batches: int = 0
    #: Payloads and frames that are none of the protocol.
    malformed: int = 0
    #: Events of kinds that Halfmoon does not know.
    unknown_events: int = 0
    connections: int = 0
    replays: int = 0
    failed_replays: int = 0


class KvEventSource:
    """The KV events of one server (one data-parallel rank)."""

    def __init__(self, endpoint: EventEndpoint, limits: SourceLimits | None = None) -> None:
        self.endpoint = endpoint
        self._limits = limits or SourceLimits()
        self._tracker = SequenceTracker(can_replay=endpoint.replay_endpoint is not None)
        self.counts = SourceCounts()
        #: True while a connection is up: what is missing arrives, or is replayed.
        self.is_connected = False

    @property
    def n_gaps(self) -> int:
        """Gaps that no replay could fill."""
        return self._tracker.n_gaps

    @property
    def n_restarts(self) -> int:
        """Restarts of the server, and losses that look like one."""
        return self._tracker.n_restarts

    async def follow(self) -> AsyncGenerator[SourceItem, None]:
        """Yield events in order, over as many connections as it takes; it never ends by itself."""
        while True:
            connection = EventConnection(self.endpoint)
            try:
                connection.open()
                async for item in self._follow(connection):
                    yield item
            except OSError as error:
                _log.warning("kv events can't be followed", error=str(error))
            finally:
                self.is_connected = False
                self.counts.malformed += connection.n_malformed
                connection.close()
            await asyncio.sleep(self._limits.reconnect_s)

    async def _follow(self, connection: EventConnection) -> AsyncGenerator[SourceItem, None]:
        """Yield the events of one connection, until it is down."""
        replay = _Replay(connection, self._limits)
        timeout_s: float | None = self._limits.connect_timeout_s
        while True:
            note = await connection.next(timeout_s)
            match note:
                case None if not self.is_connected:
                    _log.warning(
                        "no connection for kv events",
                        endpoint=self.endpoint.endpoint,
                        hint="servers listen where the setting is tcp://*:PORT; to any other "
                        "address they connect themselves",
                    )
                    return
                case None:
                    steps = self._on_deadline(replay)
                case ConnectionUp():
                    self.is_connected = True
                    self.counts.connections += 1
                    steps = self._tracker.on_connected()
                case ConnectionDown():
                    return
                case ReplayEnded():
                    replay.end()
                    steps = self._tracker.on_replay_ended()
                case Published(sequence, payload):
                    steps = self._tracker.on_live(sequence, payload)
                case Replayed(_, payload) if replay.is_too_large(payload):
                    steps = self._give_up(replay)
                case Replayed(sequence, payload):
                    steps = self._tracker.on_replayed(sequence, payload)
            for step in steps:
                if (item := self._perform(step, replay)) is not None:
                    yield item
            if self.is_connected:
                timeout_s = replay.timeout_s()

    def _on_deadline(self, replay: "_Replay") -> list[Step]:
        if replay.begin_if_due():
            self.counts.replays += 1
            return []
        return self._give_up(replay) if replay.is_late() else []

    def _give_up(self, replay: "_Replay") -> list[Step]:
        _log.warning("kv events were not replayed", endpoint=self.endpoint.replay_endpoint)
        self.counts.failed_replays += 1
        replay.end()
        return self._tracker.on_replay_failed()

    def _perform(self, step: Step, replay: "_Replay") -> SourceItem | None:
        match step:
            case AskReplay(start):
                replay.plan(start)
                if replay.begin_if_due():
                    self.counts.replays += 1
                return None
            case ResetCache():
                return CacheReset()
            case ApplyBatch(payload):
                return self._decode(payload)

    def _decode(self, payload: bytes) -> SourceItem | None:
        try:
            batch = decode_server_payload(payload)
        except MalformedMessage as error:
            self.counts.malformed += 1
            _log.warning("kv events can't be read", server=self.endpoint.endpoint, error=str(error))
            return None
        self.counts.batches += 1
        self.counts.unknown_events += batch.n_unknown
        return CacheEvents(batch.events) if batch.events else None


class _Replay:
    """The replays of one connection, one at a time and no more often than the limits say."""

    def __init__(self, connection: EventConnection, limits: SourceLimits) -> None:
        self._connection = connection
        self._limits = limits
        self._clock = asyncio.get_running_loop().time
        #: The first number of the next replay; None: none is planned.
        self._planned: int | None = None
        self._next_s = 0.0
        #: When the replay under way is late; None: none is under way.
        self._late_s: float | None = None
        self._n_batches = self._n_bytes = 0

    def plan(self, start: int) -> None:
        """Plan a replay, in place of any other."""
        self.end()
        self._planned = start

    def begin_if_due(self) -> bool:
        """Begin the planned replay if enough time has passed since the last one."""
        now = self._clock()
        if self._planned is None or now < self._next_s:
            return False
        self._connection.ask_replay(self._planned)
        self._planned = None
        self._next_s = now + self._limits.replay_interval_s
        self._late_s = now + self._limits.replay_timeout_s
        self._n_batches = self._n_bytes = 0
        return True

    def is_too_large(self, payload: bytes) -> bool:
        """Count a batch, and return whether the replay is over its bounds."""
        self._n_batches += 1
        self._n_bytes += len(payload)
        self._late_s = self._clock() + self._limits.replay_timeout_s
        return (
            self._n_batches > self._limits.max_replay_batches
            or self._n_bytes > self._limits.max_replay_bytes
        )

    def is_late(self) -> bool:
        """Return whether the replay under way has stopped."""
        return self._late_s is not None and self._late_s <= self._clock()

    def end(self) -> None:
        """Close the replay under way."""
        self._late_s = None
        self._connection.end_replay()

    def timeout_s(self) -> float | None:
        """Return the seconds until something is due; None: nothing is."""
        if self._planned is not None:
            return max(self._next_s - self._clock(), 0.0)
        return None if self._late_s is None else max(self._late_s - self._clock(), 0.0)
