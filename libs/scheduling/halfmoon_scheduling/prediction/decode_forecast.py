"""Forecast the decode pool's load at a later time, if all requests decode equally long.

`uniform_load_change` is the system-level forecast of Mooncake (arXiv 2407.00079, section 7.3).
Every request decodes for t_d, and requests that finish their prefill meanwhile are spread evenly
over the decode workers. It returns the change of requests and context from now on. So requests of
other conductors are taken to stay.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from halfmoon_protocol.ids import RequestId


class LoadChange(NamedTuple):
    """The load added until a later time; negative: removed."""

    n_requests: int
    context_tokens: int


@dataclass(slots=True)
class DecodeStay:
    """A request's stay at a decode worker, from the end of its prefill."""

    n_tokens: int
    #: When it starts to decode: predicted, or exact once it is running.
    start_s: float
    running: bool = False


#: Length at which a run of starts is cut in two.
_LONG = 256


@dataclass(slots=True)
class _Run:
    """A run of starts; the lists are in one order, sorted by time."""

    times: list[float]
    ids: list[RequestId]
    tokens: list[int]


class DecodeStarts:
    """Sort requests by the time at which they start to decode.

    They are kept in runs with sums, so that neither a change nor a count visits all of them.
    """

    def __init__(self) -> None:
        #: No run is empty, except that a single one may be.
        self._runs: list[_Run] = [_Run([], [], [])]
        #: First time (minus infinity for the first run), length and tokens of each run.
        self._firsts: list[float] = [-inf]
        self._lengths: list[int] = [0]
        self._sums: list[int] = [0]

    def __len__(self) -> int:
        return sum(self._lengths)

    def add(self, request_id: RequestId, start_s: float, n_tokens: int) -> None:
        """Add a request that is not here."""
        k = bisect_right(self._firsts, start_s) - 1
        run = self._runs[k]
        i = bisect_right(run.times, start_s)
        run.times.insert(i, start_s)
        run.ids.insert(i, request_id)
        run.tokens.insert(i, n_tokens)
        self._lengths[k] += 1
        self._sums[k] += n_tokens
        if self._lengths[k] >= _LONG:
            self._cut(k)

    def remove(self, request_id: RequestId, start_s: float) -> None:
        """Remove a request that is here with this time."""
        k = max(0, bisect_left(self._firsts, start_s) - 1)
        while request_id not in (run := self._runs[k]).ids:
            k += 1  # others have the same time
        i = run.ids.index(request_id)
        self._lengths[k] -= 1
        self._sums[k] -= run.tokens[i]
        del run.times[i], run.ids[i], run.tokens[i]
        if not run.times and len(self._runs) > 1:
            for column in (self._runs, self._firsts, self._lengths, self._sums):
                del column[k]
            self._firsts[0] = -inf

    def until(self, at_s: float) -> tuple[int, int]:
        """Return the number of requests that start at `at_s` or before, and their tokens."""
        k = bisect_right(self._firsts, at_s) - 1
        if k < 0:
            return 0, 0
        run = self._runs[k]
        i = bisect_right(run.times, at_s)
        return sum(self._lengths[:k]) + i, sum(self._sums[:k]) + sum(run.tokens[:i])

    def _cut(self, k: int) -> None:
        run, half = self._runs[k], self._lengths[k] // 2
        later = _Run(run.times[half:], run.ids[half:], run.tokens[half:])
        del run.times[half:], run.ids[half:], run.tokens[half:]
        self._runs.insert(k + 1, later)
        self._firsts.insert(k + 1, later.times[0])
        self._lengths[k : k + 1] = [half, len(later.times)]
        self._sums[k : k + 1] = [sum(run.tokens), sum(later.tokens)]

    def check(self) -> None:
        """Check that all starts are sorted, and that the sums are right."""
        times = [time for run in self._runs for time in run.times]
        assert times == sorted(times)
        assert self._firsts[0] == -inf
        for k, run in enumerate(self._runs):
            assert len(run.times) == len(run.ids) == len(run.tokens) == self._lengths[k] < _LONG
            assert self._sums[k] == sum(run.tokens)
            assert run.times or len(self._runs) == 1, "an empty run is kept"
            assert all(time >= self._firsts[k] for time in run.times)
            assert all(time <= first for first in self._firsts[k + 1 :] for time in run.times)


def uniform_load_change(
    running: DecodeStarts, pending: DecodeStarts, now: float, at_s: float, decode_time_s: float
) -> LoadChange:
    """Return the change of the pool's load if every request decodes for `decode_time_s` seconds.

    A request whose prefill is late is taken to start now.

    Args:
        running: requests that decode, by their start.
        pending: requests reserved at decode, by their predicted start.
        now: seconds.
        at_s: a later time, seconds.
        decode_time_s: t_d, seconds.
    """
    gone, gone_tokens = running.until(at_s - decode_time_s)
    came, came_tokens = pending.until(at_s)
    if at_s - decode_time_s >= now:  # so far ahead that some have come and gone
        passed, passed_tokens = pending.until(at_s - decode_time_s)
        came, came_tokens = came - passed, came_tokens - passed_tokens
    return LoadChange(came - gone, came_tokens - gone_tokens)
