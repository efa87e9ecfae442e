"""Summarise the latencies of the last minute from the conductor's seconds. No I/O."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from halfmoon_cli.status.debug_responses import StatusLatencies, StatusQuantiles, StatusSecond

#: Seconds that are shown, and seconds of one character.
SHOWN_S, BUCKET_S = 60, 2


class LatencyTrend(msgspec.Struct, frozen=True):
    """One latency over the last minute."""

    #: Number of samples.
    n: int
    #: Means of the seconds' quantiles, weighted by samples.
    p50_s: float
    p90_s: float
    #: The largest p90 of each bucket, the oldest first; None: no sample.
    p90s_s: list[float | None]


def latency_trend(latencies: StatusLatencies, of: Literal["ttft", "tbt"]) -> LatencyTrend:
    """Return the trend of one latency."""
    since_s = latencies.now_s - SHOWN_S
    buckets: list[float | None] = [None] * (SHOWN_S // BUCKET_S)
    seen: list[StatusQuantiles] = []
    for second in latencies.seconds:
        found = _of(second, of)
        if found is None or second.at_s < since_s:
            continue
        seen.append(found)
        index = min(len(buckets) - 1, int((second.at_s - since_s) / BUCKET_S))
        buckets[index] = max(found.p90_s, buckets[index] or 0.0)
    n = sum(each.n for each in seen)
    return LatencyTrend(n, _mean(seen, n, "p50_s"), _mean(seen, n, "p90_s"), buckets)


def _of(second: StatusSecond, of: Literal["ttft", "tbt"]) -> StatusQuantiles | None:
    return second.ttft if of == "ttft" else second.tbt


def _mean(seen: Sequence[StatusQuantiles], n: int, of: Literal["p50_s", "p90_s"]) -> float:
    return sum(getattr(each, of) * each.n for each in seen) / n if n else 0.0
