"""Limit a rate over one minute, for the limits per tenant; pure arithmetic."""

MINUTE_S = 60.0


class TokenBucket:
    """Fill at a steady rate up to a minute's worth.

    Costs that are known only afterwards may overdraw it.

    Args:
        per_minute: the amount added per minute, and the most that it holds; more than 0.
    """

    def __init__(self, per_minute: float) -> None:
        self._per_minute = per_minute
        #: Amount left at `_at_s`. Below zero after an answer that cost more than was left.
        self._level = per_minute
        self._at_s = float("-inf")

    def wait_s(self, n: float, now_s: float) -> float:
        """Return the seconds until `n` may be taken; 0 when it may be taken now.

        More than a whole minute's worth waits for a full bucket, and overdraws it.
        """
        self._fill(now_s)
        missing = min(n, self._per_minute) - self._level
        return max(0.0, missing * MINUTE_S / self._per_minute)

    def take(self, n: float, now_s: float) -> None:
        """Take `n`, even if less is left."""
        self._fill(now_s)
        self._level -= n

    def give_back(self, n: float) -> None:
        """Add `n` that was taken and not used."""
        self._level = min(self._per_minute, self._level + n)

    def _fill(self, now_s: float) -> None:
        if now_s > self._at_s:
            gained = (now_s - self._at_s) * self._per_minute / MINUTE_S
            self._level = min(self._per_minute, self._level + gained)
            self._at_s = now_s
