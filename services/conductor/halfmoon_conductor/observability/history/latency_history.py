"""How long clients waited lately: quantiles of each second, for the last ten minutes.

Every token passes here, so taking one in is an append. A second's samples are sorted once,
when it is over.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

#: Seconds that are remembered, those in which nothing happened not counted.
KEPT_SECONDS = 600
#: Samples of one second that are kept at the most. Past it every other one is dropped, and
#: from then on of those that come.
MAX_SAMPLES = 4096


class SecondQuantiles(msgspec.Struct, frozen=True):
    """Of one second's samples."""

    #: Samples there were, also those that were dropped.
    n: int
    p50_s: float
    p90_s: float


class LatencySecond(msgspec.Struct, frozen=True):
    """One second in which there was a token; None: none of that kind."""

    #: When it began, on the clock of `LatencyHistory`.
    at_s: int
    ttft: SecondQuantiles | None
    tbt: SecondQuantiles | None


class _Samples:
    """Of the second under way; bounded, and spread over all of it."""

    def __init__(self) -> None:
        self.n = 0
        self._kept: list[float] = []
        self._every = 1

    def add(self, seconds: float) -> None:
        if self.n % self._every == 0:
            self._kept.append(seconds)
            if len(self._kept) == MAX_SAMPLES:
                del self._kept[1::2]
                self._every *= 2
        self.n += 1

    def quantiles(self) -> SecondQuantiles | None:
        if not self._kept:
            return None
        kept = sorted(self._kept)
        return SecondQuantiles(self.n, _quantile(kept, 0.5), _quantile(kept, 0.9))


class LatencyHistory:
    """Times to the first token and between tokens, second by second."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Nothing yet.

        Args:
            clock: seconds.
        """
        self._clock = clock
        self._over: deque[LatencySecond] = deque(maxlen=KEPT_SECONDS)
        self._at_s = math.floor(clock())
        self._ttft, self._tbt = _Samples(), _Samples()

    def now(self) -> float:
        """Seconds on this clock."""
        return self._clock()

    def first_token(self, seconds: float, now_s: float) -> None:
        """A client got a first token so long after its request had been read."""
        if now_s >= self._at_s + 1:
            self._turn(now_s)
        self._ttft.add(seconds)

    def next_token(self, seconds: float, now_s: float) -> None:
        """A client got a further token so long after the one before it."""
        if now_s >= self._at_s + 1:
            self._turn(now_s)
        self._tbt.add(seconds)

    def since(self, at_s: float) -> list[LatencySecond]:
        """Seconds that are over and began later than `at_s`, the oldest first."""
        now_s = self._clock()
        if now_s >= self._at_s + 1:
            self._turn(now_s)
        oldest_s = math.floor(now_s) - KEPT_SECONDS
        return [s for s in self._over if s.at_s >= oldest_s and s.at_s > at_s]

    def _turn(self, now_s: float) -> None:
        """A new second has begun."""
        ttft, tbt = self._ttft.quantiles(), self._tbt.quantiles()
        if ttft is not None or tbt is not None:
            self._over.append(LatencySecond(self._at_s, ttft, tbt))
            self._ttft, self._tbt = _Samples(), _Samples()
        self._at_s = math.floor(now_s)


def _quantile(ordered: Sequence[float], q: float) -> float:
    """The smallest sample that at least a share of `q` does not exceed."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
