"""End landings: their pages are another request's only once no byte can land in them any more.

    its prefill worker       with a key of its own    with the pool's own key
    has stopped              free at once             free at once
    may not know             free at once             free after `quarantine_s`, cut off before

A key of its own is taken back first. Where a write by it has not ended even so, the pages rest. A
prefill worker may not know when it can't be reached, or when the conductor is gone: then it notices
so itself, within a shorter time than `quarantine_s`. It may be stopped in the middle of a copy, as
by SIGSTOP: pages rest until that has ended, or its process has.
"""

import structlog

from halfmoon_protocol.ids import RequestId
from halfmoon_runtime.clock import Clock
from halfmoon_scheduling.decode.decode_batch import DecodeBatch
from halfmoon_workers.decode.landing_keys import KeyEnd, LandingKeys

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
        #: When connections are cut, for pages aside.
        self._cuts_due_s: list[float] = []
        #: Until when nothing is freed after the last cut.
        self._cut_takes_until_s = float("-inf")
        #: Whether pages rest for longer because of a copy that does not end.
        self._waits_for_copy = False

    def take_back_key(self, request_id: RequestId) -> bool:
        """Take a landing's key back; return False if a write by it has not ended."""
        return self._keys.close(request_id) is not KeyEnd.UNDER_WAY

    def free(self, request_id: RequestId, *, in_doubt: bool) -> None:
        """Remove a request, and give back its pages once no byte can land in them any more."""
        key_end, aside_until_s = self._keys.close(request_id), None
        lands = self._batch.is_landing(request_id)
        if lands and (key_end is KeyEnd.UNDER_WAY or (in_doubt and key_end is KeyEnd.SHARED)):
            now = self._clock.now()
            aside_until_s = now + self._quarantine_s
            # The network may hold a write, or the rest of one, for longer than that.
            self._cuts_due_s.append(now + self._quarantine_s * _CUT_AFTER)
        self._batch.cancel(request_id, aside_until_s=aside_until_s)

    def expire(self) -> list[RequestId]:
        """Free what was aside for long enough, and landings past their deadline; return those."""
        now = self._clock.now()
        if any(due_s <= now for due_s in self._cuts_due_s):
            self._cuts_due_s = [due_s for due_s in self._cuts_due_s if due_s > now]
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
