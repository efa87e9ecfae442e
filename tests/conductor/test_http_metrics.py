"""What the front measures of one request, in numbers that are known beforehand."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from halfmoon_conductor.engine_io.gateway_interface import TokenEvent
from halfmoon_conductor.observability.history.latency_history import LatencyHistory
from halfmoon_conductor.observability.metrics.generation_timer import GenerationTimer
from halfmoon_conductor.observability.metrics.http_metrics import HttpMetrics
from halfmoon_runtime.clock import FakeClock

#: What the gateway knows: 0.45 s of work, 0.25 s of waiting.
STAGES = {"place": 0.2, "queue": 0.05, "fetch": 0.1, "prefill": 0.3, "transfer": 0.05}


def sums(registry: CollectorRegistry, *names: str) -> list[float | None]:
    return [registry.get_sample_value(f"halfmoon_{name}_sum") for name in names]


def test_a_request_is_split_into_waiting_work_and_decoding() -> None:
    registry = CollectorRegistry()
    metrics = HttpMetrics(registry)
    worked_s = metrics.on_first_token(1.0, 0.1, STAGES, 100, 40)
    metrics.on_end(3.0, 2.0, worked_s, 11)
    times = ("queue", "prefill", "decode", "inference", "time_per_output_token")
    assert sums(registry, *(f"request_{name}_seconds" for name in times)) == [
        pytest.approx(each) for each in (0.25, 0.45, 2.0, 2.45, 0.2)
    ]
    assert sums(registry, "e2e_request_latency_seconds") == [3.0]
    lengths = ("prompt", "computed", "generation")
    assert sums(registry, *(f"request_{name}_tokens" for name in lengths)) == [100, 60, 11]


def test_a_generation_is_measured_from_when_its_request_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock(10.0)
    monkeypatch.setattr(
        "halfmoon_conductor.observability.metrics.generation_timer.time",
        SimpleNamespace(perf_counter=clock.now),
    )
    registry = CollectorRegistry()
    latencies = LatencyHistory(clock.now)
    meter = GenerationTimer(HttpMetrics(registry, latencies), clock.now())
    clock.advance(0.125)
    meter.on_sent()
    clock.advance(0.375)
    meter.on_first_token(TokenEvent(7, stages={"prefill": 0.25}), n_prompt=3)
    clock.advance(0.25)
    meter.on_token()
    meter.on_last_token()
    names = ("time_to_first_token", "first_decode", "inter_token_latency", "e2e_request_latency")
    assert sums(registry, *(f"{name}_seconds" for name in names)) == [0.5, 0.25, 0.25, 0.75]
    stages = {
        stage: registry.get_sample_value("halfmoon_ttft_stage_seconds_sum", {"stage": stage})
        for stage in ("tokenize", "prefill", "deliver")
    }
    assert stages == {"tokenize": 0.125, "prefill": 0.25, "deliver": 0.125}
    clock.advance(1.0)
    (second,) = latencies.since(0)
    assert second.ttft is not None
    assert second.tbt is not None
    assert (second.ttft.p50_s, second.tbt.p50_s) == (0.5, 0.25)


def test_each_tenant_has_its_own_counts_and_a_request_without_one_has_none() -> None:
    registry = CollectorRegistry()
    metrics = HttpMetrics(registry)
    for tenant, n_tokens in (("lab", 2), ("shop", 1), ("", 3)):
        meter = GenerationTimer(metrics, 0.0, tenant)
        meter.on_first_token(TokenEvent(7, n_cached=40), n_prompt=100)
        for _ in range(n_tokens - 1):
            meter.on_token()
        meter.on_end("length")
    metrics.on_rejected("tenant_limit", "lab")
    metrics.on_rejected("invalid_key")

    def values(name: str, label: str) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for family in registry.collect():
            for sample in family.samples:
                if sample.name == f"halfmoon_tenant_{name}":
                    labels = sample.labels
                    found.setdefault(labels["tenant"], {})[labels[label]] = sample.value
        return found

    prompt = {"computed": 60, "cached": 40}
    assert values("tokens_total", "kind") == {
        "lab": prompt | {"generated": 2},
        "shop": prompt | {"generated": 1},
    }
    assert values("request_success_total", "finished_reason") == {
        "lab": {"length": 1},
        "shop": {"length": 1},
    }
    assert values("rejections_total", "reason") == {"lab": {"tenant_limit": 1}}
    assert set(values("time_to_first_token_seconds_count", "tenant")) == {"lab", "shop"}
