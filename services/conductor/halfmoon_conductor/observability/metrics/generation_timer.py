"""Time one generation as its tokens are written to the client."""

import time

from halfmoon_conductor.engine_io.gateway_interface import TokenEvent
from halfmoon_conductor.observability.metrics.http_metrics import HttpMetrics, HttpOutcome


class GenerationTimer:
    """Record times and counts of one generation in the metrics."""

    __slots__ = (
        *("_active_s", "_first_s", "_last_s", "_metrics", "_n", "_received_s", "_sent_s"),
        "_tenant",
    )

    def __init__(self, metrics: HttpMetrics, received_s: float, tenant: str = "") -> None:
        """Start timing at `received_s`: `time.perf_counter` when the body had been received."""
        self._metrics = metrics
        self._tenant = metrics.tenants.of(tenant)
        self._received_s = received_s
        self._sent_s = self._first_s = self._last_s = received_s
        #: Seconds before the first token in which the request was worked on.
        self._active_s = 0.0
        self._n = 0

    def on_sent(self) -> None:
        """Record that the request is sent to the gateway."""
        self._sent_s = time.perf_counter()

    def on_first_token(self, event: TokenEvent, n_prompt: int, n_new: int = 1) -> None:
        """Record the first token of an answer to a prompt of `n_prompt` tokens.

        Args:
            event: the token.
            n_prompt: tokens of the prompt.
            n_new: 0 if the token was generated for the prompt's scores alone, and does not count.
        """
        now_s = time.perf_counter()
        metrics, ttft_s = self._metrics, now_s - self._received_s
        metrics.latencies.on_first_token(ttft_s, now_s)
        self._active_s = metrics.on_first_token(
            ttft_s, self._sent_s - self._received_s, event.stages, n_prompt, event.n_cached
        )
        metrics.n_generated += n_new
        if self._tenant is not None:
            self._tenant.on_first_token(ttft_s, n_prompt, event.n_cached)
        self._first_s = self._last_s = now_s
        self._n = n_new

    def on_token(self) -> None:
        """Record a further token. This runs twenty thousand times a second: no lookups here."""
        now_s = time.perf_counter()
        metrics, since_s = self._metrics, now_s - self._last_s
        metrics.inter_token_latency_s.observe(since_s)
        metrics.latencies.on_next_token(since_s, now_s)
        metrics.n_generated += 1
        if self._n == 1:
            metrics.first_decode_s.observe(since_s)
        self._last_s = now_s
        self._n += 1

    def on_last_token(self) -> None:
        """Record that the previous token was the last."""
        self._metrics.on_end(
            self._last_s - self._received_s, self._last_s - self._first_s, self._active_s, self._n
        )

    def on_end(self, outcome: HttpOutcome) -> None:
        """Record how the generation ended."""
        self._metrics.on_outcome(outcome)
        if self._tenant is not None:
            self._tenant.on_end(outcome, self._n)
