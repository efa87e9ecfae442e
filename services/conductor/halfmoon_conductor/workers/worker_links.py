"""Link the conductor to all workers: dial them, receive their messages, send them commands.

One task per member of the cluster dials the worker, says hello and reads all of its messages.
Commands are sent at once, in order. When a link goes down, the worker counts as lost at once.
While its lease lives, it is dialled again.

A record is needed to join, not to stay: a metadata server that forgets one knows less than a link
over which its worker answers.

What comes of each attempt to reach a worker is noted in `UnreachableWorkers`.

A worker that answers heartbeats may hang all the same. If requests decode there and no token comes
for `decode_stall_s`, its link is closed, and it rests before it is dialled again.
"""

import asyncio
import itertools
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, assert_never

import msgspec
import structlog

from halfmoon_conductor.workers.shell import Shell
from halfmoon_conductor.workers.unreachable_workers import (
    NO_WELCOME,
    WRONG_WORKER,
    UnreachableWorkers,
)
from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_protocol import error_codes
from halfmoon_protocol.errors import MessageTooLarge
from halfmoon_protocol.ids import ConductorId, RequestId, WorkerId
from halfmoon_protocol.kv_events import KvEventBatch
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.messages import (
    AnyMessage,
    BlocksReplicated,
    BlocksSnapshot,
    Cancel,
    DecodeFailed,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
    Hello,
    KvstoreLoad,
    KvstoreRefused,
    Message,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillStopped,
    ToConductor,
    TokensProduced,
    Unwelcome,
    Welcome,
    WorkerInfo,
    WrongVersion,
)
from halfmoon_protocol.versions import MAX_VERSION, MIN_VERSION, version_fault
from halfmoon_runtime.channels.dropped_messages import record_drop
from halfmoon_runtime.channels.network import Network, PeerUnreachable, WorkerLink
from halfmoon_runtime.membership import MemberChanged, MemberGone, MemberJoined, watch_members
from halfmoon_runtime.worker.housekeeping import HousekeepingPace
from halfmoon_runtime.worker.message_loop import record_failure
from halfmoon_scheduling.commands import AnyCommand
from halfmoon_scheduling.events import (
    AnyEvent,
    KvChanged,
    MessageReceived,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
    WorkerJoined,
    WorkerLost,
)

log = structlog.get_logger()

#: Most workers that a conductor keeps links to.
MAX_LINKS = 4096
#: Seconds between two attempts to reach a worker: a share of the time since it answered, so that
#: a thousand that never answer take little of the loop and one that comes back is found soon.
_REDIAL_S = 0.2
_REDIAL_SHARE = 0.1
_MAX_REDIAL_S = 10.0
#: Seconds between two ticks of the core while it has requests, and while it has none.
_TICK_S = 0.05
_IDLE_TICK_S = 0.5
_POLL_S = 0.25
#: Seconds between two looks at workers that bring no tokens.
_LOOK_S = 1.0
#: Longest rest of a worker that brought no tokens, in seconds.
_MAX_REST_S = 600.0
#: Seconds after which a try whose tokens still come is cancelled again, and tries that are kept.
_CANCEL_AGAIN_S = 5.0
_MAX_CANCELLED = 4096
#: Characters that are kept of a worker's reason, which goes into logs and answers.
_MAX_REASON = 2000

_AnyRefusal = DecodeRefused | DecodeFailed | PrefillFailed | KvstoreRefused


class TokenSink(Protocol):
    """Take the tokens of requests, which skip the core."""

    def note_scores(self, done: PrefillDone) -> None:
        """Keep the scores of a prefill until its token is delivered."""
        ...

    def deliver(
        self, request_id: RequestId, token: int, finish: str, *, score: TokenScore | None = None
    ) -> bool:
        """Hand a token to the client; return whether it still waits for tokens."""
        ...

    def n_left(self, request_id: RequestId) -> int:
        """Return how many tokens the client may still get."""
        ...

    def goes_on(self, request_id: RequestId) -> bool:
        """Return whether an open end goes on elsewhere behind the next token of this try."""
        ...

    def n_produced(self, request_id: RequestId) -> int:
        """Return how many tokens this try has delivered."""
        ...


class PrefillMetrics(Protocol):
    """Count finished prefills."""

    def on_prefill_done(self, worker_id: WorkerId, done: PrefillDone) -> None:
        """Count a prefill that a worker reports as done, before the core handles it."""
        ...


@dataclass
class _Member:
    """One worker while its lease lives."""

    info: WorkerInfo
    task: asyncio.Task[None] | None = None
    #: The link; None while it is down.
    link: WorkerLink | None = None
    #: Whether the metadata server has its record; without one it is not dialled again.
    has_record: bool = True
    #: Whether the core knows the worker.
    joined: bool = False
    #: Whether the worker has answered over this link, or over the one before.
    has_answered: bool = False
    #: Why the worker is not used; empty when it is.
    refused: str = ""
    #: Number of the newest step whose tokens came over the current link; 0: none, or unnumbered.
    step: int = 0
    #: When tries that are over were last cancelled over the current link, the oldest first.
    cancelled_s: OrderedDict[RequestId, float] = field(default_factory=OrderedDict)
    #: Seconds for which requests have decoded there and no token has come.
    silent_s: float = 0.0
    #: Seconds of its last rest for such silence; 0: it has brought a token since.
    rest_s: float = 0.0
    #: Where the worker's record says that it is dialled.
    commands: str = field(init=False)

    def __post_init__(self) -> None:
        self.commands = self.info.commands

    def is_another_start(self, info: WorkerInfo) -> bool:
        """Return whether a changed record is of another start than this one.

        A metadata server that lost its counters may give two starts one generation.
        """
        return (self.info.generation, self.commands) != (info.generation, info.commands)


@dataclass
class WorkerLinks:
    """Implement `shell.WorkerPort` over the network."""

    network: Network
    store: MetadataStore
    conductor_id: ConductorId
    shell: Shell
    gateway: TokenSink
    metrics: PrefillMetrics
    #: Seconds without a token after which a decode worker counts as hanging; 0: it never does.
    decode_stall_s: float = 0.0
    unreachable: UnreachableWorkers = field(default_factory=UnreachableWorkers)
    #: Most links at a time; further members count as unreachable.
    max_links: int = MAX_LINKS
    _n_links: int = field(default=0, init=False)
    _members: dict[WorkerId, _Member] = field(default_factory=dict, init=False)
    _sessions: "itertools.count[int]" = field(
        default_factory=lambda: itertools.count(1), init=False
    )
    #: Kvstores with blocks of another layout that were logged, each with the difference.
    _logged_unused: dict[WorkerId, str] = field(default_factory=dict, init=False)
    #: Likewise of groups.
    _logged_faults: dict[str, str] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            async for change in watch_members(self.store, interval_s=_POLL_S):
                match change:
                    case MemberJoined(info=info) | MemberChanged(info=info):
                        member = self._members.get(info.worker_id)
                        if member is None or member.is_another_start(info):
                            self._add(info, tasks)
                        else:
                            member.has_record = True
                    case MemberGone(worker_id=worker_id, generation=generation):
                        self._on_record_gone(worker_id, generation)

    def send(self, worker_id: WorkerId, message: Message) -> None:
        """Send a message. A failure comes back as `WorkerLost`."""
        member = self._members.get(worker_id)
        if member is None or member.link is None:
            self.shell.post(WorkerLost(worker_id, "there is no link to it"))
            return
        self._send(member, member.link, message)

    def refuse(
        self, worker_id: WorkerId, reason: str, code: str = error_codes.LAYOUT_MISMATCH
    ) -> None:
        """Tell a worker that it can't be used, and close its link."""
        member = self._members.get(worker_id)
        if member is None:
            return
        member.refused = reason
        member.joined = False
        self.unreachable.on_gone(worker_id)
        if member.link is not None:
            with suppress(PeerUnreachable):
                member.link.send_now(Unwelcome(reason=reason, code=code))

    def refusals(self) -> dict[WorkerId, str]:
        """Return the workers that are present and not used, each with the reason."""
        return {worker_id: m.refused for worker_id, m in self._members.items() if m.refused}

    def records(self) -> list[WorkerInfo]:
        """Return the records of all workers whose lease lives, used or not."""
        return [member.info for member in self._members.values()]

    def refused_workers(self) -> list[WorkerInfo]:
        """Return the records of workers that are present and not used."""
        return [member.info for member in self._members.values() if member.refused]

    # -- membership --------------------------------------------------------------------------

    def _add(self, info: WorkerInfo, tasks: asyncio.TaskGroup) -> None:
        self._remove(info.worker_id, "it was started again")
        member = _Member(info)
        self._members[info.worker_id] = member
        member.task = tasks.create_task(self._follow(member), name=f"link {info.worker_id}")

    def _on_record_gone(self, worker_id: WorkerId, generation: int) -> None:
        """Remove a member that does not answer; one that does stays as long as its link."""
        member = self._members.get(worker_id)
        if member is None or generation != member.info.generation:
            return
        if member.joined and member.link is not None:
            member.has_record = False
            log.warning("worker_record_gone", worker_id=worker_id, reaction="it answers and stays")
        else:
            self._remove(worker_id, "its lease is over")

    def _remove(self, worker_id: WorkerId, reason: str) -> None:
        """Remove a member, if it is there."""
        if (member := self._members.pop(worker_id, None)) is None:
            return
        self.unreachable.on_gone(worker_id)
        if member.task is not None:
            member.task.cancel()
        self._lose(member, reason)

    def _lose(self, member: _Member, reason: str) -> None:
        """Note that a member's link is down; a member that had joined is lost."""
        member.link = None
        if not member.joined:
            self.unreachable.on_failure(member.info.worker_id, reason)
        else:
            member.joined = False
            if self._members.get(member.info.worker_id) is member:
                self.unreachable.on_lost(member.info, reason)
            log.warning("worker_lost", worker_id=member.info.worker_id, reason=reason)
            self.shell.post(WorkerLost(member.info.worker_id, reason))

    # -- one worker --------------------------------------------------------------------------

    async def _follow(self, member: _Member) -> None:
        """Keep a link to this worker while its lease lives."""
        now_s = asyncio.get_running_loop().time
        answered_s = now_s()
        while not member.refused:
            self.unreachable.on_dial(member.info)
            if self._n_links >= self.max_links:
                self.unreachable.on_failure(member.info.worker_id, self._full())
            else:
                self._n_links += 1
                try:
                    await self._dial(member)
                except Exception:  # a bug of ours costs only this attempt
                    log.exception("link_failed", worker_id=member.info.worker_id)
                    self._lose(member, "the conductor failed there, see its log")
                finally:
                    self._n_links -= 1
            if not member.has_record:
                if self._members.get(member.info.worker_id) is member:
                    del self._members[member.info.worker_id]
                    self.unreachable.on_gone(member.info.worker_id)
                return
            if member.has_answered:
                member.has_answered, answered_s = False, now_s()
            pause_s = min(_REDIAL_SHARE * (now_s() - answered_s), _MAX_REDIAL_S)
            await asyncio.sleep(max(_REDIAL_S, pause_s, member.rest_s))

    async def _dial(self, member: _Member) -> None:
        """Make a link to a worker, and read it to its end."""
        info = member.info
        link = await self.network.dial(info.commands, info.events, key_id=info.key_id)
        member.link, member.step = link, 0
        member.cancelled_s.clear()
        hello = Hello(
            conductor_id=self.conductor_id,
            session=next(self._sessions),
            min_version=MIN_VERSION,
            max_version=MAX_VERSION,
        )
        try:
            link.send_now(hello)
            self.unreachable.on_failure(info.worker_id, NO_WELCOME)
            while True:
                message = await link.receive()
                try:
                    self._receive(member, message)
                except Exception:  # a bug of ours costs only this message
                    record_failure(message, info.worker_id)
        except PeerUnreachable as error:
            self._lose(member, str(error))
        finally:
            await link.close()

    def _full(self) -> str:
        return (
            f"this conductor has links to {self._n_links} workers, the most that its "
            "descriptors allow; start it with a higher limit of them (ulimit -n)"
        )

    def _send(self, member: _Member, link: WorkerLink, message: Message) -> None:
        try:
            link.send_now(message)
        except PeerUnreachable as error:
            # The worker is gone or accepts no messages: either way it did not get the message.
            self._lose(member, str(error))
            link.break_off(str(error))  # which ends the reader too
        except MessageTooLarge as error:  # a bug of ours costs only this message
            record_drop("too_large", member.info.commands, error)

    def _receive(self, member: _Member, message: AnyMessage | KvEventBatch) -> None:
        if member.refused:
            return
        if isinstance(message, ToConductor | KvEventBatch):
            self._on_message(member, message)
        else:
            record_drop("unexpected", member.info.commands, type(message).__name__)

    def _on_message(self, member: _Member, message: ToConductor | KvEventBatch) -> None:
        worker_id = member.info.worker_id
        match message:
            case TokensProduced():
                self._on_tokens(member, message)
            case WrongVersion(min_version=lowest, max_version=highest):
                self._refuse_version(member, lowest, highest)
            case Welcome(worker=info) if info.worker_id == worker_id:
                if self._refuse_version(member, info.min_version, info.max_version):
                    return
                if member.joined and info == member.info:
                    return  # the worker looks whether we are there
                member.info = info
                if not member.joined:
                    log.info("worker_joined", worker_id=worker_id, role=info.role)
                self.unreachable.on_reached(worker_id)
                member.joined = member.has_answered = True
                self.shell.post(WorkerJoined(info))
                self._log_unused_kvstores()
                if info.stage is not None:
                    self._log_group_faults()
            case Welcome(worker=info):
                self.unreachable.on_failure(worker_id, WRONG_WORKER + info.worker_id)
                record_drop(
                    "foreign", member.info.commands, f"{worker_id} speaks for {info.worker_id}"
                )
            case PrefillDone():
                self.metrics.on_prefill_done(worker_id, message)
                if message.score is not None or message.prompt_scores:
                    if self.shell.core.prefill_of(message.request_id) == worker_id:
                        self.gateway.note_scores(message)
                    # The core makes no decision by scores.
                    message = msgspec.structs.replace(message, score=None, prompt_scores=())
                self.shell.post(MessageReceived(worker_id, message))
            case KvEventBatch():
                self.shell.post(KvChanged(worker_id, message))
            case DecodeRefused() | DecodeFailed() | PrefillFailed() | KvstoreRefused():
                self.shell.post(MessageReceived(worker_id, _with_bounded_reason(message)))
            case (
                DecodeReserved()
                | DecodeLoad()
                | PrefillStopped()
                | PrefillLoad()
                | BlocksReplicated()
                | BlocksSnapshot()
                | KvstoreLoad()
            ):
                self.shell.post(MessageReceived(worker_id, message))
            case _:
                assert_never(message)

    def _refuse_version(self, member: _Member, lowest: int, highest: int) -> bool:
        """Refuse a worker that speaks none of our versions; return whether it is refused."""
        worker_id = member.info.worker_id
        fault = version_fault(worker_id, lowest, highest)
        if not fault:
            return False
        log.error("worker_refused", worker_id=worker_id, reason=fault)
        was_joined = member.joined
        self.refuse(worker_id, fault, error_codes.VERSION_MISMATCH)
        if was_joined:
            self.shell.post(WorkerLost(worker_id, fault))
        return True

    def _on_tokens(self, member: _Member, message: TokensProduced) -> None:
        """Deliver tokens without the core; post an event when a request is finished."""
        worker_id, core = member.info.worker_id, self.shell.core
        if 0 < message.step <= member.step:
            record_drop("duplicate", member.info.commands, f"step {message.step} of {worker_id}")
            return
        member.step = message.step
        member.silent_s = member.rest_s = 0.0
        scores = dict(message.scores)
        for produced in message.produced:
            if core.decodes_at(produced.request_id) != worker_id:
                # The try is over, or runs elsewhere. It is cancelled there, unless it holds pages
                # there that must not be freed yet.
                if core.holds_at(produced.request_id) != worker_id:
                    self._stop_at_source(member, produced.request_id)
                continue
            # A worker that continues past the last token is stopped, whatever it reports.
            runs_on = not produced.finish and self.gateway.n_left(produced.request_id) == 1
            is_cut = produced.finish == "length" and self.gateway.goes_on(produced.request_id)
            finish = "length" if runs_on else "" if is_cut else produced.finish
            is_wanted = self.gateway.deliver(
                produced.request_id,
                produced.token,
                finish,
                score=scores.get(produced.request_id),
            )
            if produced.finish:
                n_new = self.gateway.n_produced(produced.request_id)
                self.shell.post(RequestFinished(produced.request_id, n_new, is_cut))
            elif runs_on or not is_wanted:
                self.shell.post(RequestCancelled(produced.request_id))

    def _stop_at_source(self, member: _Member, request_id: RequestId) -> None:
        """Cancel a try whose tokens are not waited for: once, though many are on their way."""
        now_s = asyncio.get_running_loop().time()
        if now_s < member.cancelled_s.get(request_id, -inf) + _CANCEL_AGAIN_S:
            return
        member.cancelled_s[request_id] = now_s
        member.cancelled_s.move_to_end(request_id)
        if len(member.cancelled_s) > _MAX_CANCELLED:
            member.cancelled_s.popitem(last=False)
        self.send(member.info.worker_id, Cancel(request_id=request_id))

    def _log_unused_kvstores(self) -> None:
        """Log kvstores that hold blocks of another layout, each once."""
        unused = self.shell.core.cluster.unused_kvstores
        for worker_id, reason in unused.items():
            if self._logged_unused.get(worker_id) != reason:
                log.error("kvstore_not_used", worker_id=worker_id, reason=reason)
        self._logged_unused = unused

    def _log_group_faults(self) -> None:
        """Log groups with missing, double or contradicting stages, each fault once."""
        faults = self.shell.core.cluster.group_faults
        for group, reason in faults.items():
            if self._logged_faults.get(group) != reason:
                log.warning("prefill_group_fault", group=group, reason=reason)
        self._logged_faults = faults

    async def _tick(self) -> None:
        pace = HousekeepingPace(busy_s=_TICK_S, idle_s=_IDLE_TICK_S)

        def wake(now: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
            if isinstance(event, RequestArrived):
                pace.wake()

        self.shell.add_recorder(wake)
        now_s = asyncio.get_running_loop().time
        looked_s = now_s()
        while True:
            self.shell.post(Tick())
            if (elapsed_s := now_s() - looked_s) >= _LOOK_S:
                looked_s += elapsed_s
                self._look_for_stalls(elapsed_s)
                self.unreachable.log_new()
            await pace.wait(idle=self.shell.core.is_idle)

    def _look_for_stalls(self, elapsed_s: float) -> None:
        """Close the links of decode workers that hold running requests and bring no token.

        Args:
            elapsed_s: seconds since the last look. While this process stood still, it read no
                tokens: what is much longer than usual is not counted.
        """
        if not self.decode_stall_s:
            return
        for member in self._members.values():
            n_running = self.shell.core.cluster.decodes.n_running_at(member.info.worker_id)
            if not (member.joined and n_running):
                member.silent_s = 0.0
                continue
            member.silent_s += min(elapsed_s, 2 * _LOOK_S)
            if member.silent_s >= self.decode_stall_s:
                self._rest(member, n_running)

    def _rest(self, member: _Member, n_running: int) -> None:
        """Take a worker out of use, each time for twice as long until it brings a token."""
        member.rest_s = min(max(2 * member.rest_s, self.decode_stall_s), _MAX_REST_S)
        reason = (
            f"{n_running} requests decode there, and it has brought no token for "
            f"{member.silent_s:.0f} s; it rests for {member.rest_s:.0f} s"
        )
        member.silent_s = 0.0
        link = member.link
        self._lose(member, reason)
        self.unreachable.on_gone(member.info.worker_id)
        if link is not None:
            link.break_off(reason)  # which ends the reader too


def _with_bounded_reason(message: _AnyRefusal) -> _AnyRefusal:
    """Return a message whose reason is at most `_MAX_REASON` characters."""
    if len(message.reason) <= _MAX_REASON:
        return message
    return msgspec.structs.replace(message, reason=message.reason[:_MAX_REASON])
