"""Measure requests as clients see them, token by token.

Values are plain numbers and histograms, since some are updated for every token. They are read when
metrics are scraped.
"""

from collections.abc import Mapping
from typing import Literal

from prometheus_client import CollectorRegistry

from halfmoon_conductor.observability.history.latency_history import LatencyHistory
from halfmoon_conductor.observability.metrics.tenant_metrics import TenantMetrics
from halfmoon_conductor.observability.metrics.ttft_stages import ACTIVE_STAGES, TTFT_STAGES
from halfmoon_runtime.observability.histogram import FastHistogram, time_buckets, token_buckets
from halfmoon_runtime.observability.metrics import (
    LabelledValues,
    MetricSnapshot,
    by_label,
    expose_metrics,
)

#: How a generation ended; "abort" is caused by the client, "error" by the server.
HttpOutcome = Literal["stop", "length", "abort", "error"]
#: Why a request was rejected before it reached the scheduler.
RejectionReason = Literal["invalid_key", "tenant_limit", "concurrency", "body"]
#: Where the events for a client that came back are from.
ResumptionSource = Literal["kept", "computed"]

_TTFT_BUCKETS_S = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_REQUEST_BUCKETS_S = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)
_MOST_TOKENS = 1_000_000


class HttpMetrics:
    """HTTP metrics in one registry, which must not have them yet."""

    def __init__(
        self, registry: CollectorRegistry, latencies: LatencyHistory | None = None
    ) -> None:
        #: TTFT and TBT of recent seconds.
        self.latencies = latencies or LatencyHistory()
        #: The same of each tenant.
        self.tenants = TenantMetrics(registry)
        #: Requests that are being answered.
        self.n_in_flight = 0
        #: Requests answered, by route and status.
        self._answered: dict[tuple[str, str], int] = {}
        self.inter_token_latency_s = FastHistogram(_TOKEN_BUCKETS_S)
        self.first_decode_s = FastHistogram(_TOKEN_BUCKETS_S)
        self.n_generated = 0
        self._ttft_s = FastHistogram(_TTFT_BUCKETS_S)
        self._stages_s = {
            stage: FastHistogram(time_buckets(0.0001, 100.0)) for stage in TTFT_STAGES
        }
        self._queue_s = FastHistogram(_REQUEST_BUCKETS_S)
        self._prefill_s = FastHistogram(_REQUEST_BUCKETS_S)
        self._decode_s = FastHistogram(_REQUEST_BUCKETS_S)
        self._inference_s = FastHistogram(_REQUEST_BUCKETS_S)
        self._per_token_s = FastHistogram(_TOKEN_BUCKETS_S)
        self._e2e_s = FastHistogram(_REQUEST_BUCKETS_S)
        self._prompt_tokens = FastHistogram(token_buckets(_MOST_TOKENS))
        self._computed_tokens = FastHistogram(token_buckets(_MOST_TOKENS))
        self._new_tokens = FastHistogram(token_buckets(_MOST_TOKENS))
        self._n_cached = 0
        self._outcomes: dict[HttpOutcome, int] = dict.fromkeys(
            ("stop", "length", "abort", "error"), 0
        )
        self._rejections: dict[RejectionReason, int] = dict.fromkeys(
            ("invalid_key", "tenant_limit", "concurrency", "body"), 0
        )
        self._resumptions: dict[ResumptionSource, int] = {"kept": 0, "computed": 0}
        expose_metrics(self.metrics, registry=registry)

    def on_answered(self, route: str, status: int) -> None:
        """Count a request by its route and its status; 0: it ended without an answer."""
        key = route, str(status or "none")
        self._answered[key] = self._answered.get(key, 0) + 1

    def on_rejected(self, reason: RejectionReason, tenant: str = "") -> None:
        """Count a request that was rejected before its body was used; empty: of no known tenant."""
        self._rejections[reason] += 1
        if (counts := self.tenants.of(tenant)) is not None:
            counts.on_rejected(reason)

    def on_resumed(self, source: ResumptionSource) -> None:
        """Count a client that came back to a stream."""
        self._resumptions[source] += 1

    def on_first_token(
        self,
        ttft_s: float,
        tokenize_s: float,
        stages: Mapping[str, float] | None,
        n_prompt: int,
        n_cached: int,
    ) -> float:
        """Record a request's first token.

        Args:
            ttft_s: seconds from the received body to the first token.
            tokenize_s: seconds of these before the request was sent to the gateway.
            stages: the gateway's seconds by stage; None: unknown.
            n_prompt: tokens of its prompt.
            n_cached: tokens of these whose KV came from a cache.

        Returns:
            Seconds of `ttft_s` in which the request was worked on.
        """
        self._ttft_s.observe(ttft_s)
        self._prompt_tokens.observe(n_prompt)
        self._computed_tokens.observe(n_prompt - n_cached)
        self._n_cached += n_cached
        if stages is None:
            return 0.0
        rest_s = ttft_s - tokenize_s - sum(stages.values())
        stages = {**stages, "tokenize": tokenize_s, "deliver": max(0.0, rest_s)}
        for stage, each_s in stages.items():
            self._stages_s[stage].observe(each_s)  # type: ignore[index]
        active_s = sum(stages[stage] for stage in ACTIVE_STAGES if stage in stages)
        self._prefill_s.observe(active_s)
        self._queue_s.observe(max(0.0, ttft_s - tokenize_s - active_s - stages["deliver"]))
        return active_s

    def on_end(self, e2e_s: float, decode_s: float, active_s: float, n_generated: int) -> None:
        """Record a request's last token.

        Args:
            e2e_s: seconds from the received body to the last token.
            decode_s: seconds since its first token.
            active_s: the value that `on_first_token` returned.
            n_generated: tokens of the answer.
        """
        self._e2e_s.observe(e2e_s)
        self._decode_s.observe(decode_s)
        self._inference_s.observe(active_s + decode_s)
        self._new_tokens.observe(n_generated)
        if n_generated > 1:
            self._per_token_s.observe(decode_s / (n_generated - 1))

    def on_outcome(self, outcome: HttpOutcome) -> None:
        """Count the end of a generation that was not refused."""
        self._outcomes[outcome] += 1

    def metrics(self) -> MetricSnapshot:
        """Return the current values of all metrics."""
        return {
            "halfmoon_http_requests_total": (
                "Requests answered, by route and status as sent (499: the client was gone)."
                " A stream that breaks later counts with its 200, and in"
                " halfmoon_request_success_total as abort or error.",
                LabelledValues(("route", "status"), dict(self._answered)),
            ),
            "halfmoon_http_requests_in_flight": (
                "Requests that are being answered.",
                self.n_in_flight,
            ),
            "halfmoon_time_to_first_token_seconds": (
                "From the request, read, to its first token.",
                self._ttft_s,
            ),
            "halfmoon_ttft_stage_seconds": (
                "What first tokens were waited for, by stage; a request's stages add up to its"
                " time to first token.",
                by_label("stage", self._stages_s),
            ),
            "halfmoon_first_decode_seconds": (
                "From a request's first token, which is prefill's, to its second: the wait for"
                " decode's next step, and that step.",
                self.first_decode_s,
            ),
            "halfmoon_inter_token_latency_seconds": (
                "Between two tokens of a request.",
                self.inter_token_latency_s,
            ),
            "halfmoon_request_time_per_output_token_seconds": (
                "Mean time between tokens of each request that had two or more.",
                self._per_token_s,
            ),
            "halfmoon_e2e_request_latency_seconds": (
                "From the request, read, to its last token.",
                self._e2e_s,
            ),
            "halfmoon_request_queue_seconds": (
                "Before the first token, the time in which a request waited without work on it: for"
                " admission, room, answers, its turn.",
                self._queue_s,
            ),
            "halfmoon_request_prefill_seconds": (
                "Before the first token, what a request was worked on: fetched, computed,"
                " transferred.",
                self._prefill_s,
            ),
            "halfmoon_request_decode_seconds": (
                "From a request's first token to its last.",
                self._decode_s,
            ),
            "halfmoon_request_inference_seconds": (
                "The last two together.",
                self._inference_s,
            ),
            "halfmoon_request_prompt_tokens": (
                "Tokens of the prompt of each request that got a first token.",
                self._prompt_tokens,
            ),
            "halfmoon_request_computed_tokens": (
                "Those of them whose KV was computed.",
                self._computed_tokens,
            ),
            "halfmoon_request_generation_tokens": (
                "Tokens of the answer of each request that got its last one.",
                self._new_tokens,
            ),
            "halfmoon_prompt_tokens_total": (
                "Tokens of prompts that got a first token.",
                self._prompt_tokens.sum,
            ),
            "halfmoon_prompt_tokens_cached_total": (
                "Those of them whose KV came from a cache.",
                self._n_cached,
            ),
            "halfmoon_generation_tokens_total": ("Tokens generated.", self.n_generated),
            "halfmoon_request_success_total": (
                "Generations that ended: stop, length, abort (by the client) or error.",
                by_label("finished_reason", self._outcomes),
            ),
            "halfmoon_http_rejections_total": (
                "Requests rejected before parsing, by reason: key, tenant's limits, requests at"
                " once, length or speed of the body.",
                by_label("reason", self._rejections),
            ),
            "halfmoon_resumed_streams_total": (
                "Clients that came back to a stream, by where its events were from: kept here, or"
                " computed again.",
                by_label("source", self._resumptions),
            ),
        }
