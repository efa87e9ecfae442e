"""Choose the replicas of a block that are worth asking: a circuit breaker for each.

    healthy ──failed──▶ left out ──pause over──▶ one probe ──answered──▶ healthy
                           ▲                         │
                           └───── failed: twice ─────┘
                                  the pause

One failure is enough: it has cost its reader a timeout, and there are other replicas, or the
blocks are computed. What is kept is bounded: a healthy replica has no entry, and one that
has not been asked for long loses its entry. No clock and no I/O here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon_protocol.messages import KvstoreAddress

#: Seconds that a replica is left out after a first failure, and at the most.
PAUSE_S = 5.0
MAX_PAUSE_S = 60.0


@dataclass(slots=True)
class _LeftOut:
    """A replica that has failed and not answered since."""

    pause_s: float
    until_s: float
    #: Until when no other request asks because a probe is under way; at most a pause ahead.
    probed_until_s: float = float("-inf")


class ReplicaHealth:
    """The replicas that one reader knows; a restarted one, of another generation, is new."""

    def __init__(self, *, pause_s: float = PAUSE_S, max_pause_s: float = MAX_PAUSE_S) -> None:
        """Take all replicas for healthy.

        Args:
            pause_s: seconds that one is left out after a first failure.
            max_pause_s: and at the most, after one failed probe after the other.

        Raises:
            ValueError: not 0 < pause_s <= max_pause_s.
        """
        if not 0 < pause_s <= max_pause_s:
            raise ValueError(f"a pause of {pause_s} s is not above 0 and at most {max_pause_s} s")
        self._pause_s = pause_s
        self._max_pause_s = max_pause_s
        self._left_out: dict[KvstoreAddress, _LeftOut] = {}

    def left_out(self, now: float) -> list[KvstoreAddress]:
        """Return the replicas whose pause is not over."""
        return [replica for replica in self._left_out if self.is_paused(replica, now)]

    def is_paused(self, replica: KvstoreAddress, now: float) -> bool:
        """Return whether a replica's pause is not over."""
        out = self._left_out.get(replica)
        return out is not None and now < out.until_s

    def may_ask(self, replica: KvstoreAddress, now: float) -> bool:
        """Return whether a replica is healthy, or due for a probe that has not begun."""
        out = self._left_out.get(replica)
        return out is None or max(out.until_s, out.probed_until_s) <= now

    def usable(self, replicas: Sequence[KvstoreAddress], now: float) -> list[KvstoreAddress]:
        """Return the replicas that may be asked now: in order, those to be probed last."""
        asked = [replica for replica in replicas if self.may_ask(replica, now)]
        return sorted(asked, key=lambda replica: replica in self._left_out)

    def asked(self, replica: KvstoreAddress, now: float) -> None:
        """Take note that a replica is being asked; if that is a probe, it is the only one."""
        if (out := self._left_out.get(replica)) is not None:
            out.probed_until_s = now + out.pause_s

    def answered(self, replica: KvstoreAddress) -> bool:
        """Take note of an answer in time; return whether the replica had been left out."""
        return self._left_out.pop(replica, None) is not None

    def failed(self, replica: KvstoreAddress, now: float) -> float:
        """Take note that a replica did not answer in time, or gave wrong bytes.

        Returns:
            For how many seconds it is left out.
        """
        before = self._left_out.get(replica)
        pause_s = self._pause_s
        if before is not None:
            # Several readers may fail at one breakdown: that is one failure.
            if now < before.until_s:
                return before.until_s - now
            pause_s = min(2 * before.pause_s, self._max_pause_s)
        self._left_out[replica] = _LeftOut(pause_s, now + pause_s)
        self._forget_old(now)
        return pause_s

    def _forget_old(self, now: float) -> None:
        for replica, out in list(self._left_out.items()):
            if out.until_s + self._max_pause_s <= now:
                del self._left_out[replica]

    def check(self) -> None:
        """Audit: pauses are within their bounds."""
        assert all(
            self._pause_s <= out.pause_s <= self._max_pause_s for out in self._left_out.values()
        )
