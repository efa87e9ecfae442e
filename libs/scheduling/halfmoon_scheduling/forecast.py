"""What decode will be running at a later moment: two forecasts, by different knowledge.

`uniform_change` is the system-level forecast of Mooncake (arXiv 2407.00079, section 7.3):
every request decodes for the same time t_d, and those that prefill finishes meanwhile are
spread evenly over the decode workers. `expected_change` looks at one decode worker and at what
is known of each of its requests: when its prefill is planned to end, how long it has been
decoding, and how long answers of its kind turn out to be; `Pace` adds those that have not
arrived yet.

Both say by how much requests and context change from now on, so that what others (other
conductors) run there is taken to stay.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon_protocol.ids import RequestId
from halfmoon_scheduling.output_lengths import LengthSample

#: Seconds over which the pace of starts is taken, and starts that are looked at at the most.
PACE_WINDOW_S = 20.0
MAX_STARTS = 4096


class Change(NamedTuple):
    """What is added (or, negative, taken away) until some moment; expectations, so fractions."""

    n_requests: float
    context_tokens: float
    #: Promised requests that start until then, those included that are over by then.
    n_planned: int = 0


@dataclass(slots=True)
class Stay:
    """One request's time at a decode worker, from the end of its prefill."""

    n_tokens: int
    #: New tokens at the most.
    max_new: int
    #: Lengths of answers to such requests.
    lengths: LengthSample
    #: When it starts to decode: predicted, and exact once it is running.
    start_s: float
    running: bool = False


def share_left(stay: Stay, n_new: float, n_more: float) -> float:
    """Probability that an answer which has `n_new` tokens gets more than `n_more` further ones."""
    if n_new + n_more >= stay.max_new:
        return 0.0
    left = stay.lengths.share_over(n_new)
    # Longer than any answer seen: nothing is known but that it goes on.
    return stay.lengths.share_over(n_new + n_more) / left if left else 1.0


def expected_change(stays: Iterable[Stay], now: float, at_s: float, token_s: float) -> Change:
    """Expected change of one worker's running requests and context between two moments.

    Args:
        stays: of the requests that run there or are promised to it.
        now: seconds.
        at_s: a later moment, seconds.
        token_s: seconds per token meanwhile.
    """
    n_requests, context_tokens, n_planned = 0.0, 0.0, 0
    n_more = (at_s - now) / token_s
    for stay in stays:
        if stay.running:
            n_new = (now - stay.start_s) / token_s
            left = share_left(stay, n_new, n_more)
            n_requests -= 1.0 - left
            context_tokens += left * n_more - (1.0 - left) * (stay.n_tokens + n_new)
        elif stay.start_s <= at_s:
            n_new = (at_s - max(now, stay.start_s)) / token_s
            left = share_left(stay, 0.0, n_new)
            n_planned += 1
            n_requests += left
            context_tokens += left * (stay.n_tokens + n_new)
    return Change(n_requests, context_tokens, n_planned)


class Pace:
    """How fast requests have been starting to decode lately, in the whole pool.

    The further ahead one looks, the more of what will run has not arrived yet. Without it a
    request whose prefill takes long would be let in on the strength of an empty future, and
    the short ones that come meanwhile would pay for it.
    """

    def __init__(self) -> None:
        #: (when, tokens) of the latest starts, the oldest first: `PACE_WINDOW_S` of them.
        self._latest: deque[tuple[float, int]] = deque(maxlen=MAX_STARTS)

    def started(self, now: float, n_tokens: int) -> None:
        """A request starts to decode."""
        self._latest.append((now, n_tokens))

    def unplanned_change(
        self,
        n_planned: int,
        n_workers: int,
        now: float,
        at_s: float,
        token_s: float,
        lengths: LengthSample,
    ) -> Change:
        """What one worker gets until a later moment beyond what is planned for it, if requests
        go on to come at this pace.

        Args:
            n_planned: requests planned to start there until then.
            n_workers: workers that share the pool's starts.
            now: seconds.
            at_s: a later moment, seconds.
            token_s: seconds per token meanwhile.
            lengths: of all answers.
        """
        while self._latest and self._latest[0][0] <= now - PACE_WINDOW_S:
            self._latest.popleft()
        if not self._latest:
            return Change(0.0, 0.0)
        ahead_s = at_s - now
        n_expected = len(self._latest) / PACE_WINDOW_S / n_workers * ahead_s
        # Those that come start half way there, in the mean.
        n_there = max(0.0, n_expected - n_planned) * lengths.share_over(ahead_s / 2 / token_s)
        mean_tokens = sum(n for _, n in self._latest) / len(self._latest)
        return Change(n_there, n_there * mean_tokens)


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
