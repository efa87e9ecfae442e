"""One generation being measured: told of each token as it is written to the client."""

import time

from halfmoon_conductor.engine_io.gateway_interface import TokenEvent
from halfmoon_conductor.observability.metrics.http_metrics import HttpMetrics, HttpOutcome


class GenerationTimer:
    """Times and counts of one generation, on their way into the metrics."""

    __slots__ = ("_asked_s", "_began_s", "_first_s", "_last_s", "_metrics", "_n", "_worked_s")

    def __init__(self, metrics: HttpMetrics, began_s: float) -> None:
        """`began_s`: `time.perf_counter` when the request had been read."""
        self._metrics = metrics
        self._began_s = began_s
        self._asked_s = self._first_s = self._last_s = began_s
        #: Seconds before the first token in which somebody worked on it.
        self._worked_s = 0.0
        self._n = 0

    def asked(self) -> None:
        """It goes to the gateway now."""
        self._asked_s = time.perf_counter()

    def first_token(self, event: TokenEvent, n_prompt: int) -> None:
        """The first token of an answer to a prompt of so many."""
        now_s = time.perf_counter()
        metrics, ttft_s = self._metrics, now_s - self._began_s
        metrics.latencies.first_token(ttft_s, now_s)
        self._worked_s = metrics.on_first_token(
            ttft_s, self._asked_s - self._began_s, event.stages, n_prompt, event.n_cached
        )
        metrics.n_generated += 1
        self._first_s = self._last_s = now_s
        self._n = 1

    def token(self) -> None:
        """A further one. Twenty thousand a second pass here: nothing is looked up."""
        now_s = time.perf_counter()
        metrics, since_s = self._metrics, now_s - self._last_s
        metrics.inter_token_latency_s.observe(since_s)
        metrics.latencies.next_token(since_s, now_s)
        metrics.n_generated += 1
        if self._n == 1:
            metrics.first_decode_s.observe(since_s)
        self._last_s = now_s
        self._n += 1

    def on_last_token(self) -> None:
        """The one before was the last."""
        self._metrics.on_end(
            self._last_s - self._began_s, self._last_s - self._first_s, self._worked_s, self._n
        )

    def ended(self, outcome: HttpOutcome) -> None:
        """Nothing more comes, for this reason."""
        self._metrics.ended(outcome)
