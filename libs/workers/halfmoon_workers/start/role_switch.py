"""Decide whether a worker obeys `ChangeRole`, and pass the new role on to its process.

The switch lives as long as the process, across its starts in both roles. Two conductors may have
different opinions, or one may have changed its mind. So a change is refused until the cool-down
since the last one is over.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from halfmoon_protocol.messages import ChangeRole, Role
from halfmoon_runtime.channels.network import Port
from halfmoon_runtime.observability.metrics import MetricSnapshot
from halfmoon_runtime.worker.message_loop import drop_unexpected
from halfmoon_workers.start.role_change_times import RoleChangeTimes

log = structlog.get_logger()

#: Longest text of a conductor in the log, in characters.
_MAX_LOGGED = 1000


@dataclass
class RoleSwitch:
    """Hold a worker's present role, and the role that a conductor wants next."""

    #: Present role; None for a worker that is no process of ours, such as one in a test.
    role: Role | None = None
    #: Roles that the worker can have; fewer than two: it keeps its role.
    roles: tuple[Role, ...] = ()
    #: Seconds after a change in which none follows.
    cooldown_s: float = 0.0
    now: Callable[[], float] = time.monotonic
    times: RoleChangeTimes = field(default_factory=RoleChangeTimes)
    #: Changes since the process started, and requests for one that were refused.
    n_changes: int = field(default=0, init=False)
    n_refused: int = field(default=0, init=False)
    _wanted: Role | None = field(default=None, init=False)
    _is_wanted: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _changed_s: float = field(default=-math.inf, init=False)
    #: Role before the change under way, once it has left that; None: none is under way.
    _left: Role | None = field(default=None, init=False)

    @property
    def record_roles(self) -> tuple[Role, ...]:
        """The field `roles` of the worker's record: empty if it keeps its role."""
        return self.roles if len(self.roles) > 1 else ()

    def on_change_role(self, message: ChangeRole, port: Port, *, greeted: bool) -> None:
        """Take a conductor's wish, or refuse it; the log and the metrics have either.

        Args:
            message: the wish.
            port: received it.
            greeted: whether its connection has said hello.
        """
        if not greeted or message.role not in self.record_roles:
            drop_unexpected(port, message)
        elif refusal := self._refusal(message.role):
            self.refuse(message.role, refusal)
        else:
            reason = message.reason[:_MAX_LOGGED]
            log.info("role_change_requested", role=message.role, reason=reason)
            self._wanted = message.role
            if self._left is None:
                self.times.begin()
            self._is_wanted.set()

    def _refusal(self, role: Role) -> str:
        """Return why this role is not taken now; empty if it is."""
        if self._wanted is not None:
            return f"the change to {self._wanted} is under way"
        if role == self.role:
            return f"the worker is a {role} worker already"
        if (left_s := self._changed_s + self.cooldown_s - self.now()) > 0:
            return (
                f"the last change was less than role_cooldown_s ({self.cooldown_s:g} s) ago,"
                f" {left_s:.0f} s are left"
            )
        return ""

    def refuse(self, role: Role, reason: str) -> None:
        """Count and log a wish that is not obeyed."""
        self.n_refused += 1
        log.warning("role_change_refused", role=role, reason=reason)

    async def wait(self) -> Role:
        """Wait for a role other than the present one to be wanted, and return it."""
        await self._is_wanted.wait()
        assert self._wanted is not None
        return self._wanted

    def withdraw(self, reason: str) -> None:
        """Keep the present role after all."""
        assert self._wanted is not None, "no change was wanted"
        role = self._wanted
        self._clear()
        self.times.abandon()
        self.refuse(role, reason)

    def complete(self) -> Role:
        """Return the role of the next start: the one that is wanted."""
        assert self._wanted is not None, "no change was wanted"
        self._left, self.role = self.role, self._wanted
        self._changed_s = self.now()
        self.n_changes += 1
        self._clear()
        self.times.next_phase()
        return self.role

    def on_serving(self) -> None:
        """Note that the worker takes requests; it may just have changed its role."""
        if self._left is not None and self.role is not None:
            self.times.complete(self._left, self.role)
            self._left = None
            if self._wanted is not None:
                self.times.begin()

    def _clear(self) -> None:
        self._wanted = None
        self._is_wanted.clear()

    def metrics(self) -> MetricSnapshot:
        """Return the counters of changes and refusals, and the seconds of changes."""
        return {
            **self.times.metrics(),
            "halfmoon_role_changes_total": (
                "Changes between prefill and decode, without loading the model again.",
                self.n_changes,
            ),
            "halfmoon_role_changes_refused_total": (
                "Requests to change the role that were refused.",
                self.n_refused,
            ),
        }
