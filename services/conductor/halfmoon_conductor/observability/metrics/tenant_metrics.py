"""Count what each tenant asks for and gets. Without tenants there are no such time series."""

from prometheus_client import CollectorRegistry

from halfmoon_runtime.observability.histogram import FastHistogram
from halfmoon_runtime.observability.metrics import (
    LabelledValues,
    MetricSnapshot,
    by_label,
    expose_metrics,
)

_TTFT_BUCKETS_S = (*(0.02, 0.05, 0.1, 0.25, 0.5), *(1.0, 2.5, 5.0, 10.0, 30.0, 120.0))


class TenantCounts:
    """Counts of one tenant."""

    __slots__ = ("endings", "n_cached", "n_generated", "n_prompt", "rejections", "ttft_s")

    def __init__(self) -> None:
        self.ttft_s = FastHistogram(_TTFT_BUCKETS_S)
        self.n_prompt = 0
        self.n_cached = 0
        self.n_generated = 0
        #: Generations that ended, by how they did.
        self.endings: dict[str, int] = {}
        #: Requests rejected before they reached the scheduler, by reason.
        self.rejections: dict[str, int] = {}

    def on_first_token(self, ttft_s: float, n_prompt: int, n_cached: int) -> None:
        """Count a prompt, of which a first token was written."""
        self.ttft_s.observe(ttft_s)
        self.n_prompt += n_prompt
        self.n_cached += n_cached

    def on_end(self, outcome: str, n_generated: int) -> None:
        """Count a generation and its tokens."""
        self.endings[outcome] = self.endings.get(outcome, 0) + 1
        self.n_generated += n_generated

    def on_rejected(self, reason: str) -> None:
        """Count a rejected request."""
        self.rejections[reason] = self.rejections.get(reason, 0) + 1


class TenantMetrics:
    """Metrics by tenant in one registry. The file of tenants bounds their number."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counts: dict[str, TenantCounts] = {}
        expose_metrics(self.metrics, registry=registry)

    def of(self, tenant: str) -> TenantCounts | None:
        """Return the counts of a tenant; None for an empty name."""
        return self._counts.setdefault(tenant, TenantCounts()) if tenant else None

    def metrics(self) -> MetricSnapshot:
        """Return the current values of all metrics."""
        counts = dict(self._counts)
        return {
            "halfmoon_tenant_time_to_first_token_seconds": (
                "From a tenant's request, read, to its first token.",
                by_label("tenant", {name: each.ttft_s for name, each in counts.items()}),
            ),
            "halfmoon_tenant_tokens_total": (
                "Tokens of a tenant: computed and cached ones of prompts that got a first token,"
                " and generated ones of generations that ended.",
                LabelledValues(
                    ("tenant", "kind"),
                    {
                        (name, kind): n
                        for name, each in counts.items()
                        for kind, n in (
                            ("computed", each.n_prompt - each.n_cached),
                            ("cached", each.n_cached),
                            ("generated", each.n_generated),
                        )
                    },
                ),
            ),
            "halfmoon_tenant_request_success_total": (
                "Generations of a tenant that ended: stop, length, abort (by the client) or error.",
                LabelledValues(
                    ("tenant", "finished_reason"),
                    {
                        (name, reason): n
                        for name, each in counts.items()
                        for reason, n in dict(each.endings).items()
                    },
                ),
            ),
            "halfmoon_tenant_rejections_total": (
                "Requests of a tenant rejected before they reached the scheduler, by reason.",
                LabelledValues(
                    ("tenant", "reason"),
                    {
                        (name, reason): n
                        for name, each in counts.items()
                        for reason, n in dict(each.rejections).items()
                    },
                ),
            ),
        }
