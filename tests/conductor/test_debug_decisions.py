"""Explanations of decisions for operators: `/debug/decisions`, `/metrics`."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError

from halfmoon_conductor.observability.history.observer import CoreObserver
from halfmoon_conductor.observability.metrics.cluster_metrics import ClusterMetrics
from halfmoon_conductor.page.cluster_view import ConductorInfo
from halfmoon_conductor.page.debug_routes import debug_app
from halfmoon_conductor.page.prometheus_targets import PrometheusTargets
from halfmoon_conductor.settings import ConductorSettings
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import PrefillCost, WorkerInfo
from halfmoon_scheduling.events import RequestArrived, RequestFinished, Tick
from halfmoon_testing.scheduling_inputs import a_request, a_worker
from tests.conductor.fronts import client_of
from tests.conductor.watched_core import WatchedCore


@pytest.fixture
def watched() -> WatchedCore:
    """One request served, in twice the time that was predicted, and one refused."""
    watched = WatchedCore(now=0.0, admission="early", ttft_slo_s=2.5)
    watched.join("prefill-0", prefill_cost=PrefillCost(c0_s=2.0, c1_s=0.0))
    watched.join("decode-0")
    watched.handle(RequestArrived(a_request("cmpl-1")))
    watched.handle(RequestArrived(a_request("cmpl-2")))
    watched.reserve("cmpl-1")
    watched.now = 4.0
    watched.prefill("cmpl-1", compute_s=4.0)
    watched.now += 10 * 0.022  # said: 0.011
    watched.handle(RequestFinished(RequestId("cmpl-1"), 11))
    return watched


@pytest.fixture
def observer(watched: WatchedCore) -> CoreObserver:
    return watched.observer


Ask = Callable[[str], Awaitable[httpx.Response]]


@pytest.fixture
async def ask(watched: WatchedCore) -> AsyncIterator[Ask]:
    info, traces = ConductorInfo("conductor-0"), {"cmpl-1": "4bf9"}.get
    async with client_of(
        debug_app(watched.observer, watched.links, watched.clock, info, traces)
    ) as client:
        yield client.get


async def refused(ask: Ask, path: str, param: str) -> str:
    """The reason for which a parameter is refused."""
    answer = await ask(path)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), path
    return str(error["message"])


async def test_a_placement_and_a_refusal_come_with_their_tables_and_the_reason(
    ask: Ask,
) -> None:
    placed, other = (await ask("/decisions")).json()["decisions"]
    assert (placed["request_id"], placed["outcome"], placed["reason"]) == ("cmpl-1", "placed", "")
    assert placed["placement"]["chosen"]["ttft_s"] == 2.0
    assert placed["prefill_load"] == pytest.approx(2.0 / 2.5)
    assert (other["request_id"], other["outcome"]) == ("cmpl-2", "refused")
    assert other["placement"]["estimates"][0]["queue_s"] == pytest.approx(2.0)
    assert "predicted time to first token is 4 s" in other["reason"]
    assert (placed["trace_id"], other["trace_id"]) == ("4bf9", None)


async def test_decisions_are_found_by_a_part_of_a_request_id(ask: Ask) -> None:
    async def found(text: str) -> list[str]:
        answer = await ask(f"/decisions?request_id={text}")
        return [each["request_id"] for each in answer.json()["decisions"]]

    assert await found("pl-2") == ["cmpl-2"]
    assert await found("cmpl") == ["cmpl-1", "cmpl-2"]
    assert await found("chatcmpl") == []
    long = f"/decisions?request_id={'a' * 129}"
    assert "at most 128" in await refused(ask, long, "request_id")


@pytest.mark.parametrize("url", ["javascript:{trace_id}", "http://jaeger/trace"])
def test_a_link_to_traces_is_a_web_address_with_a_place_for_the_id(url: str) -> None:
    with pytest.raises(ValidationError, match="must begin with http"):
        ConductorSettings(model="fake://tiny", trace_url=url)


async def test_activity_is_told_second_by_second_with_workers_that_came(
    ask: Ask, observer: CoreObserver
) -> None:
    await refused(ask, "/activity?after_s=-0", "after_s")
    observer.record(5.0, Tick(), [])
    answer = (await ask("/activity")).json()
    (second,) = answer["seconds"]
    assert (second["at_s"], second["finished"], second["prompt_tokens"]) == (4, 1, 40)
    assert [(e["kind"], e["worker_id"]) for e in answer["events"]] == [
        ("joined", "prefill-0"),
        ("joined", "decode-0"),
    ]


async def test_a_decision_is_told_in_words_with_what_came_of_it(ask: Ask) -> None:
    placed, other = (await ask("/decisions")).json()["decisions"]
    assert placed["why"] == (
        "prefill-0: the only one that could; nothing of it is cached; "
        "decode-0 for decode, 11 ms between tokens"
    )
    course = placed["course"]
    assert (course["n_tokens"], course["n_cached"], course["n_new"]) == (40, 0, 11)
    assert (course["ttft_s"], course["compute_s"], course["end"]) == (4.0, 4.0, "finished")
    assert course["tbt_s"] == pytest.approx(0.022)
    assert other["why"] == other["reason"]
    assert other["course"]["end"] == "rejected"


async def test_the_last_few_decisions_can_be_had_alone(ask: Ask) -> None:
    (newest,) = (await ask("/decisions?last=1")).json()["decisions"]
    assert newest["request_id"] == "cmpl-2"
    assert (await ask("/decisions?last=0")).json()["decisions"] == []
    for wrong in ("-1", "x", "1e9", "0.5", "9" * 400):
        await refused(ask, f"/decisions?last={wrong}", "last")


async def test_seconds_are_taken_as_json_writes_them(ask: Ask) -> None:
    for right in ("0", "1.5", "2.2e-311", "1E3"):
        assert (await ask(f"/latencies?after_s={right}")).status_code == 200
    for wrong in ("1_0", "nan", "inf", "1e999", "-1", " 1", "."):
        await refused(ask, f"/latencies?after_s={wrong}", "after_s")


def test_prediction_errors_and_refusals_are_metrics(observer: CoreObserver) -> None:
    registry = CollectorRegistry()
    ClusterMetrics(observer.core, registry)
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        'halfmoon_prediction_error_ratio_bucket{le="1.5625",quantity="ttft"} 0.0',
        'halfmoon_prediction_error_ratio_bucket{le="2.5",quantity="ttft"} 1.0',
        'halfmoon_prediction_error_ratio_bucket{le="+Inf",quantity="ttft"} 1.0',
        'halfmoon_prediction_error_ratio_count{quantity="tbt"} 1.0',
        'halfmoon_rejections_total{reason="ttft"} 1.0',
    ):
        assert line in lines, line


# -- what Prometheus' service discovery is told ---------------------------------------------------


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
