"""A rate with a memory of one minute: the pure arithmetic of limits per tenant."""

MINUTE_S = 60.0


class TokenBucket:
    """Fills at a steady rate up to a minute's worth; may be overdrawn by what is not known first.

    Args:
        per_minute: what it fills with in a minute, and the most that it holds; more than 0.
    """

    def __init__(self, per_minute: float) -> None:
        self._per_minute = per_minute
        #: What is left at `_at_s`. Below zero after an answer that was longer than the rest.
        self._level = per_minute
        self._at_s = float("-inf")

    def wait_s(self, n: float, now_s: float) -> float:
        """Seconds until `n` may be taken; 0 when they may be taken now.

        What is more than a whole minute's worth has to wait for a full bucket, and overdraws it.
        """
        self._fill(now_s)
        missing = min(n, self._per_minute) - self._level
        return max(0.0, missing * MINUTE_S / self._per_minute)

    def take(self, n: float, now_s: float) -> None:
        """Take `n`, be they there or not."""
        self._fill(now_s)
        self._level -= n

    def _fill(self, now_s: float) -> None:
        if now_s > self._at_s:
            gained = (now_s - self._at_s) * self._per_minute / MINUTE_S
            self._level = min(self._per_minute, self._level + gained)
            self._at_s = now_s
