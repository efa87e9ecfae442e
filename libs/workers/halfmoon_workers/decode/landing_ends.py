"""End landings: their pages are another request's only once no byte can land in them any more.

    its prefill worker       with a key of its own    with the pool's own key
    has stopped              free at once             free at once
    may not know             free at once             free after `quarantine_s`, cut off before

A key of its own is taken back first. Where a write by it goes on, the pages rest until it has
ended. A thread waits for that, for about a second, and cuts its connection. The event loop goes on
meanwhile: it has steps to run. Pages whose write has not ended even so rest for `quarantine_s`.

A prefill worker may not know when it can't be reached, or when the conductor is gone. Then it
notices so itself, within a shorter time than `quarantine_s`. It may be stopped in the middle of a
copy, as by SIGSTOP: pages rest until that has ended, or its process has.
"""

import asyncio

import structlog

from halfmoon_protocol.ids import RequestId
from halfmoon_runtime.clock import Clock
from halfmoon_scheduling.decode.decode_batch import AsideNumber, DecodeBatch
from halfmoon_transfer.grant_lender import finish
from halfmoon_transfer.regions.grant_revocation import GrantRevocation
from halfmoon_workers.decode.landing_keys import LandingKeys

log = structlog.get_logger()

#: Part of the quarantine after which connections are cut: no write begins any more, and there is
#: time for what is being received to end.
_CUT_AFTER = 5 / 6


class LandingEnds:
    """Ends landings of one batch, with the keys that they gave out."""

    def __init__(
        self, batch: DecodeBatch, keys: LandingKeys, clock: Clock, quarantine_s: float
    ) -> None:
        """Have ended none.

        Args:
            batch: has the landings.
            keys: by which they are written.
            clock: of their deadlines.
            quarantine_s: seconds that pages rest after their last write may have begun.
        """
        self._batch, self._keys, self._clock = batch, keys, clock
        self._quarantine_s = quarantine_s
        #: Parent of the waits for writes to end; None while the worker does not serve.
        self._tasks: asyncio.TaskGroup | None = None
        #: Landings that wait for their last write to end, with their key taken back.
        self._closing: dict[RequestId, GrantRevocation] = {}
        #: When connections are cut, for which pages aside.
        self._cuts_due: list[tuple[float, AsideNumber]] = []
        #: Until when nothing is freed after the last cut.
        self._cut_takes_until_s = float("-inf")
        #: Whether pages rest for longer because of a copy that does not end.
        self._waits_for_copy = False

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Use this group as the parent of waits."""
        self._tasks = tasks

    def close(self) -> None:
        """Begin no further wait; the group ends. Pages whose write goes on rest from now on."""
        self._tasks = None

    def take_back_key(self, request_id: RequestId) -> GrantRevocation | None:
        """Take a landing's key back; if a write by it goes on, return what `last_write` takes."""
        revocation = self._keys.close(request_id)
        if revocation is None or revocation.is_over:
            return None
        self._closing[request_id] = revocation
        return revocation

    def is_closing(self, request_id: RequestId) -> bool:
        """Return whether a landing waits for its last write to end."""
        return request_id in self._closing

    async def last_write(self, request_id: RequestId, revocation: GrantRevocation) -> bool | None:
        """Wait for the end of a landing's last write.

        Args:
            request_id: of the landing.
            revocation: of its key; a later landing of the same name has another one.

        Returns:
            Whether it has ended. If not, the landing can only be freed. None: it was freed
            meanwhile.
        """
        ended = await asyncio.to_thread(finish, revocation)
        if self._closing.get(request_id) is not revocation:
            return None
        if ended:
            del self._closing[request_id]
        return ended

    def free(self, request_id: RequestId, *, in_doubt: bool) -> None:
        """Remove a request, and give back its pages once no byte can land in them any more."""
        revocation = self._closing.pop(request_id, None) or self._keys.close(request_id)
        goes_on = in_doubt if revocation is None else not revocation.is_over
        if not goes_on or not self._batch.is_landing(request_id):
            self._batch.cancel(request_id)
            return
        now = self._clock.now()
        aside = self._batch.set_aside(request_id, now + self._quarantine_s)
        # The network may hold a write, or the rest of one, for longer than that.
        self._cuts_due.append((now + self._quarantine_s * _CUT_AFTER, aside))
        if revocation is not None and self._tasks is not None:
            self._tasks.create_task(self._free_early(aside, revocation), name="landing's end")

    async def _free_early(self, aside: AsideNumber, revocation: GrantRevocation) -> None:
        """Free pages as soon as their last write has ended."""
        if await asyncio.to_thread(finish, revocation):
            self._batch.free_early(aside)

    def expire(self) -> list[RequestId]:
        """Free what was aside for long enough, and landings past their deadline; return those."""
        now = self._clock.now()
        due = [aside for due_s, aside in self._cuts_due if due_s <= now]
        if due:
            self._cuts_due = [each for each in self._cuts_due if each[0] > now]
            if any(map(self._batch.is_aside, due)):
                self._keys.cut()
                # It may come late: this process can stand still, too.
                self._cut_takes_until_s = now + self._quarantine_s * (1 - _CUT_AFTER)
        if self._batch.pages_quarantined and now >= self._cut_takes_until_s:
            self._free_aside(now)
        late = self._batch.late_landings(now)
        for request_id in late:
            self.free(request_id, in_doubt=True)
        return late

    def _free_aside(self, now: float) -> None:
        if self._keys.is_quiet():
            self._waits_for_copy = False
            self._batch.free_aside(now)
        elif not self._waits_for_copy:
            self._waits_for_copy = True
            log.warning(
                "pages_rest",
                reason="a peer was stopped in the middle of a copy into them; they are used again "
                "once it goes on or ends",
                n_pages=self._batch.pages_quarantined,
            )
