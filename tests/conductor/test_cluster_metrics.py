"""What the conductor shows of the cluster, over a real core."""

from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from halfmoon_conductor.observability.metrics.cluster_metrics import ClusterMetrics
from halfmoon_conductor.observability.metrics.http_metrics import HttpMetrics
from halfmoon_conductor.observability.metrics.vllm_metric_names import (
    VLLM_METRIC_NAMES,
    VllmNamedMetrics,
)
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.kv_events import BlockStored, KvEventBatch
from halfmoon_protocol.messages import BlocksSnapshot, DecodeLoad
from halfmoon_runtime.observability.metrics import by_label, expose_metrics
from halfmoon_scheduling.commands import AnyCommand, Fail, Resubmit
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    KvChanged,
    MessageReceived,
    RequestArrived,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_testing.scheduling_inputs import a_prefill_done, a_request, a_worker

KVSTORE = WorkerId("kvstore-0")


class Bench:
    """A core whose events are recorded."""

    def __init__(self) -> None:
        self.core = Conductor(SchedulingConfig())
        self.registry = CollectorRegistry()
        self.metrics = ClusterMetrics(self.core, self.registry, wall_clock=lambda: 1000.0)

    def post(self, event: AnyEvent) -> list[AnyCommand]:
        commands = self.core.handle(event, 0.0)
        self.metrics.record(0.0, event, commands)
        return commands

    def prefilled(self, **fields: Any) -> None:
        """A request of 40 tokens, of which 32 were cached."""
        done = msgspec.structs.replace(a_prefill_done("r"), n_cached=32, **fields)
        self.metrics.on_prefill_done(WorkerId("prefill-0"), done)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    for name in ("prefill-0", "decode-0", "kvstore-0"):
        bench.post(WorkerJoined(a_worker(name)))
    return bench


def events(sequence: int, at_s: float = 999.5) -> KvChanged:
    stored = BlockStored(
        block_hashes=(bytes([sequence]) * 16,), parent_block_hash=None, token_ids=(), block_size=16
    )
    return KvChanged(KVSTORE, KvEventBatch(sequence, at_s, (stored,)))


def snapshot(bench: Bench, sequence: int) -> None:
    bench.post(MessageReceived(KVSTORE, BlocksSnapshot(sequence=sequence, hashes=())))


def test_events_lag_by_the_kvstores_clock_and_never_less_than_nothing(bench: Bench) -> None:
    bench.post(events(0, at_s=999.5))
    bench.post(events(1, at_s=1003.0))  # its clock is ahead
    assert bench.value("halfmoon_kv_event_lag_seconds_count") == 2
    assert bench.value("halfmoon_kv_event_lag_seconds_sum") == 0.5


def test_events_that_were_lost_count_as_behind_until_a_snapshot_has_them(bench: Bench) -> None:
    snapshot(bench, -1)
    assert bench.value("halfmoon_kv_events_behind", kvstore="kvstore-0") == 0
    bench.post(events(0))
    bench.post(events(3))
    assert bench.value("halfmoon_kv_events_behind", kvstore="kvstore-0") == 3
    assert bench.value("halfmoon_kv_snapshots_total") == 2
    snapshot(bench, 2)
    assert bench.value("halfmoon_kv_events_behind", kvstore="kvstore-0") == 0
    assert bench.value("halfmoon_index_blocks") == 1


def test_what_is_shown_of_a_worker_goes_with_it(bench: Bench) -> None:
    load = DecodeLoad(
        n_running=0, n_reserved=0, context_tokens=0, free_pages=60, n_pages=100, step_s=0.0
    )
    bench.post(MessageReceived(WorkerId("decode-0"), load))
    assert bench.value("halfmoon_cluster_pages", role="decode", state="used") == 40
    assert bench.value("halfmoon_kv_cache_usage_ratio", role="decode") == pytest.approx(0.4)
    for name in ("decode-0", "kvstore-0"):
        bench.post(WorkerLost(WorkerId(name), "gone"))
    assert bench.value("halfmoon_cluster_pages", role="decode", state="used") == 0
    assert bench.value("halfmoon_kv_cache_usage_ratio", role="decode") is None
    assert bench.value("halfmoon_workers", role="decode") == 0
    assert b"kvstore-0" not in generate_latest(bench.registry)
    bench.post(WorkerJoined(a_worker("decode-0", generation=2)))  # and says nothing yet
    assert bench.value("halfmoon_cluster_pages", role="decode", state="used") == 0


def test_requests_are_counted_by_phase_and_their_tokens_by_where_they_are_from(
    bench: Bench,
) -> None:
    bench.post(RequestArrived(a_request("r", n_tokens=40)))
    assert bench.value("halfmoon_requests", phase="reserving") == 1
    bench.prefilled(fetched_bytes=1000)
    assert bench.value("halfmoon_prefilled_tokens_total", source="computed") == 8
    assert bench.value("halfmoon_kv_fetched_bytes_total") == 1000


@pytest.mark.parametrize(
    ("host", "fetched_from", "source"),
    [
        ("host-0", KVSTORE, "kvstore_same_host"),
        ("host-1", KVSTORE, "kvstore_other_host"),
        ("host-0", None, "kvstore_elsewhere"),
    ],
)
def test_cached_tokens_are_counted_by_where_their_kvstore_is(
    bench: Bench, host: str, fetched_from: WorkerId | None, source: str
) -> None:
    bench.post(WorkerJoined(a_worker("prefill-0", generation=2, host="host-0")))
    bench.post(WorkerJoined(a_worker("kvstore-0", generation=2, host=host)))
    bench.prefilled(fetched_from=fetched_from)
    assert bench.value("halfmoon_prefilled_tokens_total", source=source) == 32


def test_tries_that_came_to_nothing_are_counted(bench: Bench) -> None:
    rid = RequestId("r")
    bench.metrics.record(0.0, Tick(), [Resubmit(rid, "lost"), Fail(rid, "no"), Resubmit(rid, "x")])
    assert bench.value("halfmoon_request_retries_total") == 2
    assert bench.value("halfmoon_requests_failed_total") == 1


def shown(registry: CollectorRegistry, model: str) -> list[str]:
    return generate_latest(VllmNamedMetrics(registry, lambda: model)).decode().splitlines()


def test_vllms_names_show_our_samples_with_vllms_labels() -> None:
    registry = CollectorRegistry()
    front = HttpMetrics(registry)
    front.on_first_token(0.5, 0.1, {"queue": 0.1, "prefill": 0.2}, 100, 40)
    order = ("deferred", "waiting", "reserving", "prefilling", "landed", "decoding", "stopping")
    phases = {phase: 2**bit for bit, phase in enumerate(order)}
    tokens = {"computed": 1, "kvstore_same_host": 2, "kvstore_other_host": 4}
    usage = {"prefill": 0.25, "decode": 0.5}
    readings = {
        "halfmoon_requests": ("Requests.", by_label("phase", phases)),
        "halfmoon_prefilled_tokens_total": ("Tokens.", by_label("source", tokens)),
        "halfmoon_kv_cache_usage_ratio": ("Used.", by_label("role", usage)),
    }
    expose_metrics(lambda: readings, registry=registry)
    lines = shown(registry, "moon")
    labels = 'engine="0",model_name="moon"'
    for line in (
        f"vllm:num_requests_waiting{{{labels}}} 7.0",
        f"vllm:num_requests_running{{{labels}}} 56.0",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.5",
        f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}} 1.0',
        f'vllm:prompt_tokens_by_source_total{{{labels},source="external_kv_transfer"}} 6.0',
        f"vllm:prompt_tokens_total{{{labels}}} 100.0",
        f"vllm:prefix_cache_hits_total{{{labels}}} 40.0",
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="moon"} 0.0',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="moon"} 1.0',
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 1.0",
        "# TYPE vllm:prompt_tokens_total counter",
        "# TYPE vllm:request_queue_time_seconds histogram",
    ):
        assert line in lines, line


def test_vllms_names_are_there_once_the_model_is_known(bench: Bench) -> None:
    HttpMetrics(bench.registry)
    assert not [line for line in shown(bench.registry, "") if "vllm" in line]
    typed = {line.split()[2] for line in shown(bench.registry, "moon") if "# TYPE vllm" in line}
    assert typed == set(VLLM_METRIC_NAMES)
