"""Keep the members of the cluster: workers hold a record under a lease, conductors watch them.

    halfmoon/generation/<worker id>   a counter of this worker's starts
    halfmoon/members/<worker id>      its `WorkerInfo` as JSON, under a lease
    halfmoon/segments/<worker id>     how its memory is reached; the transfer engine writes it

The record of a crashed worker disappears when its lease has expired. A restarted worker has a
higher generation and takes the record over. While the metadata server is unreachable, nothing
changes: workers keep retrying, conductors keep their view. A server that comes back may have lost
records, or leases may have expired meanwhile. So conductors miss no worker until each had the time
to write its record again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import structlog

from halfmoon_metadata.start_counter import count_start
from halfmoon_metadata.store_interface import MetadataError, MetadataStore
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.observability.metrics import MetricSnapshot

MEMBERS = "halfmoon/members/"
GENERATIONS = "halfmoon/generation/"
#: Prefix of the segments' records; a worker's segment has its worker's name and generation.
SEGMENTS = "halfmoon/segments/"
#: Seconds that a crashed worker's record remains. Its closed sockets show a death at once, mostly.
#: A much shorter lease would expire while a busy machine delays a worker that is alive.
LEASE_S = 10.0
#: Seconds between two attempts while the metadata server is unreachable.
_RETRY_S = 0.5
#: Longest wait of `update` and `leave` for the metadata server, in seconds. A server that is
#: stopped, not dead, would delay the end of a worker by its time-outs, one after another.
_PATIENCE_S = 2.0
_WRITE_TRIES = 10
#: Longest text of a record in the log, in characters.
_MAX_LOGGED = 200

T = TypeVar("T")
_log = structlog.get_logger(__name__)
_decoder: msgspec.json.Decoder[WorkerInfo] = msgspec.json.Decoder(WorkerInfo)


class Superseded(Exception):
    """A process of this worker's name started later; this process must stop."""


class _Counted(msgspec.Struct):
    """Hold what the records of one start have in common."""

    generation: int


# -- a worker's side ---------------------------------------------------------------------------


async def next_generation(store: MetadataStore, worker_id: WorkerId, *, above: int = 0) -> int:
    """Count this start of a worker: return 1, or more than any earlier start.

    The result is also higher than the generation in the worker's present records. They may outlive
    the counter: after a metadata server lost its data, live workers write their records again, but
    not the counters. A worker that is killed between its two writes leaves its segment's record
    alone. A worker that changes its role has removed its records by then, so its process states the
    generation of its last start.

    Args:
        store: the metadata server.
        worker_id: the worker that starts.
        above: generation of an earlier start, known to the caller.

    Waits for the metadata server without limit.

    Raises:
        ImplausibleGeneration: a present record of the worker is not one that a worker wrote.
    """

    def count() -> int:
        there = {
            key: _generation_of(store.get(key))
            for key in (MEMBERS + worker_id, SEGMENTS + worker_id)
        }
        return count_start(store, GENERATIONS + worker_id, there, above=above)

    return await until_done(f"generation of {worker_id}", lambda: asyncio.to_thread(count))


def _generation_of(record: bytes | None) -> int:
    """Return the generation in a record; 0 without one, or for one that can't be read."""
    if record is None:
        return 0
    try:
        return msgspec.json.decode(record, type=_Counted).generation
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0


class Membership:
    """Write, renew, update and remove one worker's record.

    Args:
        store: the metadata server.
        info: the worker's record, with a generation from `next_generation`.
        ttl_s: seconds of the lease; it is renewed after each third of them.
        now: returns seconds that only grow.
        restore: writes this worker's other records in the metadata server, in a thread. It is
            called before a record that the server does not have is written, so that a member
            never comes back without them. It may raise `MetadataError`.
    """

    def __init__(
        self,
        store: MetadataStore,
        info: WorkerInfo,
        *,
        ttl_s: float = LEASE_S,
        now: Callable[[], float] = time.monotonic,
        restore: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._info = info
        self._restore = restore
        self._ttl_s = ttl_s
        self._now = now
        self._key = MEMBERS + info.worker_id
        #: Of its own: a lease must not wait behind calls that take seconds each, as to a dead peer.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lease")
        #: Held while the record is written, so that updates and renewals keep their order.
        self._writing = asyncio.Lock()
        #: Writes that go on, some of them without a caller that waits.
        self._writes: set[asyncio.Task[None]] = set()
        self._left = False
        #: Time of the last grant or renewal of the lease; None: never.
        self._renewed_s: float | None = None

    @property
    def info(self) -> WorkerInfo:
        """The worker's record, as written or soon to be written."""
        return self._info

    async def join(self) -> None:
        """Write the record; wait for the metadata server without limit.

        Raises:
            Superseded: a later start of this worker is registered.
        """
        await until_done(self._key, self._write)

    async def update(self, info: WorkerInfo) -> None:
        """Change the record; if the metadata server does not answer, `keep_alive` writes it later.

        Raises:
            Superseded: a later start of this worker is registered.
        """
        assert (info.worker_id, info.generation) == (self._info.worker_id, self._info.generation)
        self._info = info
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._write()
        except (MetadataError, TimeoutError) as error:
            _log.warning("record not written, will try again", key=self._key, error=_text(error))

    async def keep_alive(self) -> None:
        """Renew the lease until `leave`, or until cancelled.

        Raises:
            Superseded: a later start of this worker took the record.
        """
        while not self._left:
            await asyncio.sleep(self._ttl_s / 3)
            await until_done(self._key, self._write)

    async def leave(self) -> None:
        """Remove the record if it is still that of this start, and stop renewing it.

        A metadata server that does not answer in `_PATIENCE_S` is not waited for.
        """
        self._left = True
        try:
            async with asyncio.timeout(_PATIENCE_S), self._writing:
                await self._in_thread(self._remove_now)
        except (MetadataError, TimeoutError) as error:
            _log.warning("record not removed, it expires", key=self._key, error=_text(error))

    async def _write(self) -> None:
        """Write the record in its turn. A cancelled caller leaves; the write goes on to its end.

        Its thread can't be stopped. It holds the lock, so that `leave` removes the record after it.
        """
        write = asyncio.create_task(self._write_in_turn())
        self._writes.add(write)
        write.add_done_callback(self._forget_write)
        await asyncio.shield(write)

    async def _write_in_turn(self) -> None:
        async with self._writing:
            if not self._left:
                await self._in_thread(self._write_now)
                self._renewed_s = self._now()

    async def _in_thread(self, call: Callable[[], None]) -> None:
        context = copy_context()
        await asyncio.get_running_loop().run_in_executor(self._thread, context.run, call)

    def _forget_write(self, write: "asyncio.Task[None]") -> None:
        self._writes.discard(write)
        if not write.cancelled():
            write.exception()  # its caller may be gone; the next write fails in the same way

    def metrics(self) -> MetricSnapshot:
        """Return the age of the lease as a metric."""
        if self._renewed_s is None:
            return {}
        age_s = self._now() - self._renewed_s
        return {
            "halfmoon_membership_lease_age_seconds": (
                f"Since this worker's record was renewed; after {self._ttl_s:.0f} s it is gone.",
                age_s,
            )
        }

    def _write_now(self) -> None:
        value = msgspec.json.encode(self._info)
        for _ in range(_WRITE_TRIES):
            current = self._store.get(self._key)
            other = _decode(self._key, current)
            if other is not None and other.generation > self._info.generation:
                raise Superseded(
                    f"worker {self._info.worker_id} of generation {self._info.generation} is "
                    f"superseded: generation {other.generation} runs at {other.commands}; of two "
                    "workers with one name the later one counts, so give one another --worker-id"
                )
            if current is None:
                self._restore()
            if self._store.compare_and_swap(self._key, current, value, ttl_s=self._ttl_s):
                return
        raise MetadataError(f"{self._key!r} changed under each of {_WRITE_TRIES} writes")

    def _remove_now(self) -> None:
        current = self._store.get(self._key)
        other = _decode(self._key, current)
        if other is not None and other.generation == self._info.generation:
            self._store.compare_and_swap(self._key, current, None)


def _text(error: Exception) -> str:
    return str(error) or f"no answer in {_PATIENCE_S:g} s"


async def until_done(
    what: str, attempt: Callable[[], Awaitable[T]], *, on_back: Callable[[], None] = lambda: None
) -> T:
    """Repeat a call until the metadata server answers, and return the result.

    Args:
        what: what is read or written, for the log.
        attempt: makes the call.
        on_back: called before the return if a call has failed.
    """
    failures = 0
    while True:
        try:
            result = await attempt()
        except MetadataError as error:
            if failures % 20 == 0:
                _log.warning("metadata server is away, still trying", what=what, error=str(error))
            failures += 1
            await asyncio.sleep(_RETRY_S)
        else:
            if failures:
                _log.info("metadata server is back", what=what, failures=failures)
                on_back()
            return result


# -- a conductor's side ------------------------------------------------------------------------


@dataclass(frozen=True)
class MemberJoined:
    """A worker has joined."""

    info: WorkerInfo


@dataclass(frozen=True)
class MemberChanged:
    """A worker has changed its record; its generation is the same."""

    info: WorkerInfo


@dataclass(frozen=True)
class MemberGone:
    """A start of a worker has ended: it left, its lease expired, or a later start took over."""

    worker_id: WorkerId
    generation: int


MemberEvent = MemberJoined | MemberChanged | MemberGone


async def list_members(store: MetadataStore) -> dict[WorkerId, WorkerInfo]:
    """Return all present members.

    Raises:
        MetadataError: the metadata server can't be reached.
    """
    return readable_members(await asyncio.to_thread(store.list, MEMBERS))


def readable_members(records: Mapping[str, bytes]) -> dict[WorkerId, WorkerInfo]:
    """Return the members of records below `MEMBERS`; log and leave out what can't be read."""
    return _readable(records, {})[0]


async def find_model_worker(
    read_members: Callable[[], Awaitable[Iterable[WorkerInfo]]], *, limit_s: float = 2.0
) -> WorkerInfo | None:
    """Return a member whose record states the KV layout of the cluster's model, if any.

    Args:
        read_members: returns all members, from the metadata server.
        limit_s: seconds to wait for them.
    """
    try:
        async with asyncio.timeout(limit_s):
            there = await read_members()
    except (MetadataError, TimeoutError):
        return None
    return first_model_worker(there)


def first_model_worker(there: Iterable[WorkerInfo]) -> WorkerInfo | None:
    """Return the first member, by name, whose record states the KV layout of the model."""
    models = [info for info in there if info.role != "kvstore" and info.layout is not None]
    return min(models, key=lambda info: info.worker_id, default=None)


async def watch_members(
    store: MetadataStore, *, interval_s: float = 0.5, rejoin_s: float = LEASE_S
) -> AsyncIterator[MemberEvent]:
    """Yield all members as `MemberJoined`, then every change, without end.

    An outage of the store removes no member: the view stays as it was. After an outage a record
    may be missing although its worker lives. It counts as missing once `rejoin_s` have passed.

    Args:
        store: the metadata server.
        interval_s: seconds between two reads.
        rejoin_s: seconds in which each worker that lives writes its record again.
    """
    view: dict[WorkerId, WorkerInfo] = {}
    seen: _Seen = {}
    now_s = asyncio.get_running_loop().time
    rejoined_at_s = 0.0

    def on_back() -> None:
        nonlocal rejoined_at_s
        rejoined_at_s = now_s() + rejoin_s

    while True:
        records = await until_done(
            MEMBERS, lambda: asyncio.to_thread(store.list, MEMBERS), on_back=on_back
        )
        now, seen = _readable(records, seen)
        if now_s() < rejoined_at_s:
            now = view | now
        for event in diff_members(view, now):
            yield event
        view = now
        await asyncio.sleep(interval_s)


def diff_members(
    before: Mapping[WorkerId, WorkerInfo], now: Mapping[WorkerId, WorkerInfo]
) -> list[MemberEvent]:
    """Return the events between two views: departures first, each kind by worker id."""
    gone: list[MemberEvent] = []
    there: list[MemberEvent] = []
    for worker_id in sorted(before.keys() | now.keys()):
        old, new = before.get(worker_id), now.get(worker_id)
        if old is not None and (new is None or new.generation != old.generation):
            gone.append(MemberGone(worker_id, old.generation))
            old = None
        if new is not None and old is None:
            there.append(MemberJoined(new))
        elif new is not None and new != old:
            there.append(MemberChanged(new))
    return gone + there


#: Records as they were read last, and what they say; None: nothing that can be read.
_Seen = dict[str, tuple[bytes, WorkerInfo | None]]


def _readable(
    records: Mapping[str, bytes], seen: _Seen
) -> tuple[dict[WorkerId, WorkerInfo], _Seen]:
    """Return the members in these records, and what was seen; the unreadable are logged once.

    A record that has not changed is not parsed again: thousands are read several times a second.
    """
    members: dict[WorkerId, WorkerInfo] = {}
    now_seen: _Seen = {}
    for key, value in records.items():
        before = seen.get(key)
        is_new = before is None or before[0] != value
        info = _decode(key, value) if before is None or is_new else before[1]
        now_seen[key] = (value, info)
        if info is not None:
            members[info.worker_id] = info
        elif is_new:
            _log.warning(
                "member's record can't be read, ignored",
                key=key[:_MAX_LOGGED],
                reason=_unreadable(key, value)[:_MAX_LOGGED],
                record=value[:_MAX_LOGGED],
            )
    return members, now_seen


def _unreadable(key: str, value: bytes) -> str:
    """Return the reason why `_decode` returns None."""
    try:
        info = _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return str(error)
    return f"it is {info.worker_id}'s, the key is {key}"


def _decode(key: str, value: bytes | None) -> WorkerInfo | None:
    """Decode a record; return None if it is absent, broken, or of another worker than its key."""
    if value is None:
        return None
    try:
        info = _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return info if key == MEMBERS + info.worker_id else None
