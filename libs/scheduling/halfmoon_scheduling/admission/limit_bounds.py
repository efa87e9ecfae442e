"""Bound the times that admission compares with limits, by the errors of their predictions.

A mean prediction that equals the limit is missed by half of the requests, and under overload the
queue settles just there. So admission compares a quantile: what the prediction was, times the ratio
that a share `admission_quantile` of recent predictions did not exceed.

Learnt from are requests that were placed once and got their first token, or all tokens. A request
that was placed again, retried, cancelled or refused took a time that no prediction was made for.
"""

from halfmoon_scheduling.placement.estimates import Estimate
from halfmoon_scheduling.prediction.error_quantiles import ErrorBound, ErrorQuantiles
from halfmoon_scheduling.prediction.sliding_quantile import SlidingQuantile
from halfmoon_scheduling.requests.request_state import RequestState

#: Ratios of observed to predicted times that are assumed before any was seen. A decode step is
#: mostly a constant: a limit is often not far above it, and a larger prior would refuse all.
TTFT_PRIOR, TBT_PRIOR = 1.25, 1.02
#: A request waits for the step under way before it joins a batch. In a shorter answer that is much
#: of the time between its tokens, which no smaller batch would change.
MIN_INTERVALS = 16
#: A wait that ends a tick earlier costs little, and one that ends late misses its limit for sure.
LATENESS_QUANTILE = 0.99


class LimitBounds:
    """Learn the errors of the predictions that admission relies on."""

    def __init__(self, q: float) -> None:
        """Start without observations.

        Args:
            q: share of requests that shall keep each limit.
        """
        # What misses one limit need not miss the other. A larger margin for the first token only
        # shortens a queue, and one for the time between tokens makes batches smaller.
        self._ttft = ErrorQuantiles((1 + q) / 2, of="of queue", prior=TTFT_PRIOR)
        #: Of the time between tokens: as forecast at arrival, and in the batch that is joined.
        # They lie close to one another, and a short one grows with its batch: so they are told
        # apart finely, or a batch that grew would limit one that has grown.
        self._forecast_tbt, self._joined_tbt = (
            ErrorQuantiles(q, of="between tokens", prior=TBT_PRIOR, per_doubling=8, by_length=False)
            for _ in range(2)
        )
        #: Seconds after its time at which a request that waits for decode went on.
        self._lateness = SlidingQuantile()
        #: Seconds between ticks while there were requests.
        self._ticks = SlidingQuantile()

    # -- bounds ------------------------------------------------------------------------------

    def ttft(self, n_tokens: int, chosen: Estimate, now: float) -> ErrorBound:
        """Bound the seconds from now to the first token."""
        return self._ttft.bound(n_tokens, chosen.queue_s, chosen.ttft_s, now)

    def forecast_tbt(self, n_tokens: int, tbt_s: float, now: float) -> ErrorBound:
        """Bound the time between tokens that was forecast when a request arrived."""
        return self._forecast_tbt.bound(n_tokens, tbt_s, tbt_s, now)

    def joined_tbt(self, n_tokens: int, tbt_s: float, now: float) -> ErrorBound:
        """Bound the time between tokens in a batch that a request is to join now."""
        return self._joined_tbt.bound(n_tokens, tbt_s, tbt_s, now)

    @property
    def lateness_s(self) -> float:
        """Seconds after its time at which nearly all waiting requests have gone on.

        It is a tick at least: before any has gone on, nothing else is known.
        """
        return max(self._lateness.quantile(LATENESS_QUANTILE), self._ticks.quantile(0.5))

    # -- observations ------------------------------------------------------------------------

    def on_prefill_done(self, state: RequestState, now: float) -> None:
        """Learn from the time to first token, before any wait for decode."""
        if (placement := state.placement) is None or not state.is_placed_once:
            return
        observed_s = now - state.placed_s
        n_tokens, chosen = len(state.request.token_ids), placement.chosen
        self._ttft.observe(n_tokens, chosen.queue_s, chosen.ttft_s, observed_s, now)

    def on_tick(self, since_s: float) -> None:
        """Learn the seconds since the tick before."""
        self._ticks.observe(since_s)

    def on_landed_timeout(self, late_s: float) -> None:
        """Learn how late a request goes on whose time to wait for decode is over."""
        self._lateness.observe(late_s)

    def on_finished(self, state: RequestState, tbt_s: float, n_intervals: int, now: float) -> None:
        """Learn from the mean time between a request's tokens, of which there were enough."""
        if not state.is_placed_once or n_intervals < MIN_INTERVALS:
            return
        n_tokens = len(state.request.token_ids)
        for errors, predicted_s in (
            (self._forecast_tbt, state.forecast_tbt_s),
            (self._joined_tbt, state.joined_tbt_s),
        ):
            errors.observe(n_tokens, predicted_s, predicted_s, tbt_s, now)

    def check(self) -> None:
        """Audit all that was learnt."""
        for errors in (self._ttft, self._forecast_tbt, self._joined_tbt):
            errors.check()
        self._lateness.check()
        self._ticks.check()
