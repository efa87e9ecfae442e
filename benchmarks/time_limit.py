"""Bound how long a comparison of several rounds takes."""

import time
from collections.abc import Iterator


def rounds_within(n_rounds: int, minutes: float) -> Iterator[int]:
    """Yield the number of each round, from 0, and end before one that would pass the limit.

    A round is expected to take as long as the longest one so far; the first is always made.
    """
    started = now = time.monotonic()
    longest_s = 0.0
    for number in range(n_rounds):
        if number and now + longest_s > started + 60 * minutes:
            return
        yield number
        longest_s = max(longest_s, time.monotonic() - now)
        now = time.monotonic()
