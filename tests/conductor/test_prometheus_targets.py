"""What Prometheus' service discovery is told: `/debug/prometheus-targets`."""

from typing import Any

import msgspec

from halfmoon_conductor.page.prometheus_targets import PrometheusTargets
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_testing.scheduling_inputs import a_worker


def at(name: str, http: str, **changes: Any) -> WorkerInfo:
    info = msgspec.structs.replace(a_worker(name), http=http, model="m")
    return msgspec.structs.replace(info, **changes)


def labels(job: str, worker: str, scheme: str = "http", model: str = "m") -> dict[str, str]:
    return {"job": job, "worker": worker, "model": model, "__scheme__": scheme}


def test_the_conductor_and_each_worker_with_an_address_are_a_target() -> None:
    own = ("https://10.0.0.1:8000", "https://10.0.0.1:9100")
    workers = [
        at("prefill-0", "http://10.0.0.3:9100"),
        at("decode-1", "http://[::1]:41234"),
        at("kvstore-0", "http://10.0.0.2:9100", model=""),
        at("prefill-1", ""),
        at("prefill-2", "http://10.0.0.3:port"),
        at("prefill-3", "10.0.0.3"),
    ]
    assert PrometheusTargets("conductor-0", own).groups(workers, "m") == [
        {"targets": ["10.0.0.1:8000"], "labels": labels("conductor", "conductor-0", "https")},
        {"targets": ["10.0.0.1:9100"], "labels": labels("conductor", "conductor-0", "https")},
        {"targets": ["[::1]:41234"], "labels": labels("decode", "decode-1")},
        {"targets": ["10.0.0.2:9100"], "labels": labels("kvstore", "kvstore-0")},
        {"targets": ["10.0.0.3:9100"], "labels": labels("prefill", "prefill-0")},
    ]


def test_workers_of_one_plain_server_are_one_target_at_its_own_path() -> None:
    workers = [
        at(name, "http://10.0.0.9/vllm/", server="server-0", worker_id=WorkerId(f"server-0-{name}"))
        for name in ("prefill-0", "decode-0", "kvstore-0")
    ]
    expected = labels("server", "server-0") | {"__metrics_path__": "/vllm/metrics"}
    assert PrometheusTargets("c", ()).groups(workers, "m") == [
        {"targets": ["10.0.0.9:80"], "labels": expected}
    ]


def test_labels_stay_when_the_last_worker_goes() -> None:
    targets = PrometheusTargets("c", ("http://10.0.0.1:8000",))
    seen = [targets.groups((), model)[0]["labels"]["model"] for model in ("", "m", "", "n")]
    assert seen == ["", "m", "m", "n"]
