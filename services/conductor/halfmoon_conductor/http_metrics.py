"""What the front measures, under the names that vLLM's dashboards know, with our prefix."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from halfmoon_conductor.first_token import STAGES
from halfmoon_conductor.observed.latencies import Latencies
from halfmoon_runtime import counters
from halfmoon_runtime.histograms import Histogram

_TTFT_BUCKETS_S = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_STAGE_BUCKETS_S = (
    *(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    *(3.0, 10.0, 30.0, 100.0),
)
_TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_E2E_BUCKETS_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0)
_LONG_E2E_BUCKETS_S = (40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)


class HttpMetrics:
    """The front's metrics in one registry, which must not have them yet."""

    def __init__(self, registry: CollectorRegistry, latencies: Latencies | None = None) -> None:
        #: The same two latencies second by second.
        self.latencies = latencies or Latencies()
        self.requests = Counter(
            "halfmoon_http_requests",
            "Requests answered, by route and status (499: the client was gone).",
            ("route", "status"),
            registry=registry,
        )
        self.in_flight = Gauge(
            "halfmoon_http_requests_in_flight",
            "Requests that are being answered.",
            registry=registry,
        )
        self.time_to_first_token_s = Histogram(
            "halfmoon_time_to_first_token_seconds",
            "From the request, read, to its first token.",
            _TTFT_BUCKETS_S,
            registry,
        )
        self.ttft_stage_s = Histogram(
            "halfmoon_ttft_stage_seconds",
            "What the first token was waited for, by stage; a request's stages add up to its"
            " time to first token.",
            _STAGE_BUCKETS_S,
            registry,
            label="stage",
            values=STAGES,
        )
        self.first_decode_s = Histogram(
            "halfmoon_first_decode_seconds",
            "From a request's first token, which is prefill's, to its second: the wait for the"
            " next step of decode, and that step.",
            _TOKEN_BUCKETS_S,
            registry,
        )
        self.inter_token_latency_s = Histogram(
            "halfmoon_inter_token_latency_seconds",
            "Between two tokens of a request.",
            _TOKEN_BUCKETS_S,
            registry,
        )
        self.e2e_request_latency_s = Histogram(
            "halfmoon_e2e_request_latency_seconds",
            "From the request, read, to its last token.",
            _E2E_BUCKETS_S + _LONG_E2E_BUCKETS_S,
            registry,
        )
        self.prompt_tokens = counters.Counter(
            "halfmoon_prompt_tokens", "Tokens of prompts that got a first token.", registry
        )
        self.prompt_tokens_cached = counters.Counter(
            "halfmoon_prompt_tokens_cached",
            "Those of them whose KV came from a cache.",
            registry,
        )
        self.generation_tokens = counters.Counter(
            "halfmoon_generation_tokens", "Tokens generated.", registry
        )
        self.request_success = Counter(
            "halfmoon_request_success",
            "Generations that ended: stop, length, abort (by the client) or error.",
            ("finished_reason",),
            registry=registry,
        )

    def on_first_token(
        self, ttft_s: float, tokenize_s: float, stages: Mapping[str, float] | None
    ) -> None:
        """A request has its first token.

        Args:
            ttft_s: from the request, read, to here.
            tokenize_s: of those, until it was handed to the gateway.
            stages: what the gateway knows of the rest; None: nothing.
        """
        self.time_to_first_token_s.observe(ttft_s)
        if stages is None:
            return
        for stage, seconds in stages.items():
            self.ttft_stage_s.observe(seconds, stage)
        self.ttft_stage_s.observe(tokenize_s, "tokenize")
        rest_s = ttft_s - tokenize_s - sum(stages.values())
        self.ttft_stage_s.observe(max(0.0, rest_s), "deliver")
