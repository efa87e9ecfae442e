"""What decode will be running at a later moment, if all requests decode for the same time.

`uniform_change` is the system-level forecast of Mooncake (arXiv 2407.00079, section 7.3):
every request decodes for t_d, and those that prefill finishes meanwhile are spread evenly over
the decode workers. It says by how much requests and context change from now on, so that what
others (other conductors) run there is taken to stay.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon_protocol.ids import RequestId


class Change(NamedTuple):
    """What is added, or, negative, taken away until some moment."""

    n_requests: int
    context_tokens: int


@dataclass(slots=True)
class Stay:
    """One request's time at a decode worker, from the end of its prefill."""

    n_tokens: int
    #: When it starts to decode: predicted, and exact once it is running.
    start_s: float
    running: bool = False


class Starts:
    """Requests by the time at which they start to decode; both lookups take a search."""

    def __init__(self) -> None:
        #: Sorted. The other two lists are in the same order.
        self._times: list[float] = []
        self._ids: list[RequestId] = []
        self._tokens: list[int] = []

    def __len__(self) -> int:
        return len(self._times)

    def add(self, request_id: RequestId, start_s: float, n_tokens: int) -> None:
        """Put a request in; it is not here."""
        i = bisect_right(self._times, start_s)
        self._times.insert(i, start_s)
        self._ids.insert(i, request_id)
        self._tokens.insert(i, n_tokens)

    def remove(self, request_id: RequestId, start_s: float) -> None:
        """Take a request out; it is here, with this time."""
        i = self._ids.index(request_id, bisect_left(self._times, start_s))
        del self._times[i], self._ids[i], self._tokens[i]

    def between(self, after_s: float, until_s: float) -> tuple[int, int]:
        """How many start in ``(after_s, until_s]``, and their tokens."""
        i, j = bisect_right(self._times, after_s), bisect_right(self._times, until_s)
        return max(0, j - i), sum(self._tokens[i:j])

    def check(self) -> None:
        """Audit: sorted, and three lists of one length."""
        assert self._times == sorted(self._times)
        assert len(self._times) == len(self._ids) == len(self._tokens)


def uniform_change(
    running: Starts, pending: Starts, now: float, at_s: float, decode_time_s: float
) -> Change:
    """Change of the whole pool if every request decodes for `decode_time_s` seconds.

    A request whose prefill should be over and is not is taken to start now.

    Args:
        running: requests that decode, by their start.
        pending: requests promised to decode, by their predicted start.
        now: seconds.
        at_s: a later moment, seconds.
        decode_time_s: t_d, seconds.
    """
    gone, gone_tokens = running.between(float("-inf"), at_s - decode_time_s)
    came, came_tokens = pending.between(float("-inf"), at_s)
    if at_s - decode_time_s >= now:  # so far ahead that some have come and gone
        passed, passed_tokens = pending.between(float("-inf"), at_s - decode_time_s)
        came, came_tokens = came - passed, came_tokens - passed_tokens
    return Change(came - gone, came_tokens - gone_tokens)
