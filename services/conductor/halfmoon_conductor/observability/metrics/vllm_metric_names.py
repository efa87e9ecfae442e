"""Export the same metrics under vLLM's names, for dashboards made for vLLM.

A name is listed if its meaning is the same, with the metric of ours that it shows. Nothing is
measured twice: a scrape shows our metric under both names. vLLM's labels are `model_name` and
`engine`, which is always "0": to a dashboard the cluster is one engine.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

#: vLLM's request phases, made of ours. vLLM's waiting requests have no slot in a batch. A request
#: in a prefill worker's queue has one, and counts as running.
_WAITING = ("deferred", "waiting", "quarantined", "reserving")
_RUNNING = ("prefilling", "landed", "decoding")


class VllmMetricSource(NamedTuple):
    """The metric of ours that a name of vLLM's shows."""

    metric: str
    #: Only samples whose label has one of these values, summed; empty: all, as they are.
    label: str = ""
    values: tuple[str, ...] = ()
    #: Label to add, with its value.
    extra: tuple[str, str] | None = None


#: vLLM's name as queries write it, without the suffixes of histograms → ours.
VLLM_METRIC_NAMES: dict[str, tuple[VllmMetricSource, ...]] = {
    "vllm:time_to_first_token_seconds": (VllmMetricSource("halfmoon_time_to_first_token_seconds"),),
    "vllm:inter_token_latency_seconds": (VllmMetricSource("halfmoon_inter_token_latency_seconds"),),
    # Its name before inter_token_latency_seconds.
    "vllm:time_per_output_token_seconds": (
        VllmMetricSource("halfmoon_inter_token_latency_seconds"),
    ),
    "vllm:request_time_per_output_token_seconds": (
        VllmMetricSource("halfmoon_request_time_per_output_token_seconds"),
    ),
    "vllm:e2e_request_latency_seconds": (VllmMetricSource("halfmoon_e2e_request_latency_seconds"),),
    "vllm:request_queue_time_seconds": (VllmMetricSource("halfmoon_request_queue_seconds"),),
    "vllm:request_prefill_time_seconds": (VllmMetricSource("halfmoon_request_prefill_seconds"),),
    "vllm:request_decode_time_seconds": (VllmMetricSource("halfmoon_request_decode_seconds"),),
    "vllm:request_inference_time_seconds": (
        VllmMetricSource("halfmoon_request_inference_seconds"),
    ),
    "vllm:request_prompt_tokens": (VllmMetricSource("halfmoon_request_prompt_tokens"),),
    "vllm:request_prefill_kv_computed_tokens": (
        VllmMetricSource("halfmoon_request_computed_tokens"),
    ),
    "vllm:request_generation_tokens": (VllmMetricSource("halfmoon_request_generation_tokens"),),
    "vllm:prompt_tokens_total": (VllmMetricSource("halfmoon_prompt_tokens_total"),),
    "vllm:prompt_tokens_cached_total": (VllmMetricSource("halfmoon_prompt_tokens_cached_total"),),
    "vllm:generation_tokens_total": (VllmMetricSource("halfmoon_generation_tokens_total"),),
    "vllm:request_success_total": (VllmMetricSource("halfmoon_request_success_total"),),
    "vllm:prefix_cache_queries_total": (VllmMetricSource("halfmoon_prompt_tokens_total"),),
    "vllm:prefix_cache_hits_total": (VllmMetricSource("halfmoon_prompt_tokens_cached_total"),),
    "vllm:prompt_tokens_by_source_total": (
        VllmMetricSource(
            "halfmoon_prefilled_tokens_total",
            "source",
            ("computed",),
            ("source", "local_compute"),
        ),
        VllmMetricSource(
            "halfmoon_prefilled_tokens_total",
            "source",
            ("kvstore_same_host", "kvstore_other_host", "kvstore_elsewhere"),
            ("source", "external_kv_transfer"),
        ),
    ),
    "vllm:num_requests_running": (VllmMetricSource("halfmoon_requests", "phase", _RUNNING),),
    "vllm:num_requests_waiting": (VllmMetricSource("halfmoon_requests", "phase", _WAITING),),
    "vllm:kv_cache_usage_perc": (
        VllmMetricSource("halfmoon_kv_cache_usage_ratio", "role", ("decode",)),
    ),
}


class VllmNamedMetrics(Collector):
    """Collect a registry's metrics, then again under vLLM's names where there is one."""

    def __init__(self, registry: CollectorRegistry, model: Callable[[], str]) -> None:
        """Collect from a registry.

        Args:
            registry: has the metrics under our names.
            model: returns the model's name; "" while it is unknown, and vLLM's names are omitted.
        """
        self._registry = registry
        self._model = model

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics."""
        families = {family.name: family for family in self._registry.collect()}
        yield from families.values()
        if not (model := self._model()):
            return
        labels = {"model_name": model, "engine": "0"}
        for name, sources in VLLM_METRIC_NAMES.items():
            found = [(source, families.get(_family(source.metric))) for source in sources]
            if shown := [(source, family) for source, family in found if family is not None]:
                yield _renamed_metric(name, shown, labels)


def _family(name: str) -> str:
    """Return a metric's name without the suffix of its samples."""
    return name.removesuffix("_total")


def _renamed_metric(
    name: str, shown: list[tuple[VllmMetricSource, Metric]], labels: dict[str, str]
) -> Metric:
    first = shown[0][1]
    renamed = Metric(_family(name), f"As vLLM has it. {first.documentation}", first.type)
    for source, family in shown:
        added = labels if source.extra is None else {**labels, **dict([source.extra])}
        if not source.values:
            for sample in family.samples:
                suffix = sample.name.removeprefix(family.name)
                renamed.add_sample(_family(name) + suffix, {**sample.labels, **added}, sample.value)
            continue
        chosen = [s.value for s in family.samples if s.labels[source.label] in source.values]
        renamed.add_sample(name, added, sum(chosen))
    return renamed
