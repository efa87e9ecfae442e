"""Keep the latencies of clients: quantiles of each second, for the last ten minutes.

Every token is recorded, so recording is an append. A second's samples are sorted once, when it is
over.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

#: Seconds that are kept; those without samples do not count.
KEPT_SECONDS = 600
#: Most samples of one second. Beyond that every other sample is dropped, and every other one of
#: those that follow.
MAX_SAMPLES = 4096


class SecondQuantiles(msgspec.Struct, frozen=True):
    """Quantiles of one second's samples."""

    #: Number of samples, dropped ones included.
    n: int
    p50_s: float
    p90_s: float


class LatencySecond(msgspec.Struct, frozen=True):
    """One second with at least one token; None: no samples of that kind."""

    #: Begin of the second on the clock of `LatencyHistory`.
    at_s: int
    ttft: SecondQuantiles | None
    tbt: SecondQuantiles | None


class _Samples:
    """Samples of the current second; bounded, and spread over all of it."""

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
    """Keep TTFT and TBT by second."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Create an empty history.

        Args:
            clock: returns seconds.
        """
        self._clock = clock
        self._over: deque[LatencySecond] = deque(maxlen=KEPT_SECONDS)
        self._at_s = math.floor(clock())
        self._ttft, self._tbt = _Samples(), _Samples()

    def now(self) -> float:
        """Return the time in seconds on this clock."""
        return self._clock()

    def on_first_token(self, seconds: float, now_s: float) -> None:
        """Record a TTFT, counted from the received body."""
        if now_s >= self._at_s + 1:
            self._start_second(now_s)
        self._ttft.add(seconds)

    def on_next_token(self, seconds: float, now_s: float) -> None:
        """Record a TBT."""
        if now_s >= self._at_s + 1:
            self._start_second(now_s)
        self._tbt.add(seconds)

    def since(self, at_s: float) -> list[LatencySecond]:
        """Return the completed seconds that began later than `at_s`, the oldest first."""
        now_s = self._clock()
        if now_s >= self._at_s + 1:
            self._start_second(now_s)
        oldest_s = math.floor(now_s) - KEPT_SECONDS
        return [s for s in self._over if s.at_s >= oldest_s and s.at_s > at_s]

    def _start_second(self, now_s: float) -> None:
        """Begin a new second."""
        ttft, tbt = self._ttft.quantiles(), self._tbt.quantiles()
        if ttft is not None or tbt is not None:
            self._over.append(LatencySecond(self._at_s, ttft, tbt))
            self._ttft, self._tbt = _Samples(), _Samples()
        self._at_s = math.floor(now_s)


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Return the smallest sample that at least a share of `q` does not exceed."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
