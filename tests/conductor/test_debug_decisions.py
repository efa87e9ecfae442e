"""Explanations of decisions for operators: `/debug/decisions`, `/metrics`."""

from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError

from halfmoon_conductor.generation.core_gateway import CoreGateway
from halfmoon_conductor.observability.history.latency_history import LatencyHistory
from halfmoon_conductor.observability.history.observer import CoreObserver
from halfmoon_conductor.observability.metrics.cluster_metrics import ClusterMetrics
from halfmoon_conductor.page.cluster_view import ConductorInfo
from halfmoon_conductor.page.debug_routes import debug_app
from halfmoon_conductor.settings import ConductorSettings
from halfmoon_conductor.workers.shell import Shell
from halfmoon_conductor.workers.worker_links import WorkerLinks
from halfmoon_metadata import MemoryStore
from halfmoon_protocol.ids import ConductorId, RequestId, WorkerId
from halfmoon_protocol.messages import DecodeReserved, PrefillCost, PrefillDone
from halfmoon_runtime.channels.memory_network import MemoryNetwork
from halfmoon_runtime.clock import FakeClock
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    MessageReceived,
    RequestArrived,
    RequestFinished,
    Tick,
    WorkerJoined,
)
from halfmoon_testing.scheduling_inputs import a_landing, a_request, a_worker


@pytest.fixture
def observer() -> CoreObserver:
    """One request served, in twice the time that was predicted, and one refused."""
    core = Conductor(SchedulingConfig(admission="early", ttft_slo_s=2.5))
    observer = CoreObserver(core, LatencyHistory())

    def handle(event: AnyEvent, now: float) -> None:
        observer.record(now, event, core.handle(event, now))

    cost = PrefillCost(c0_s=2.0, c1_s=0.0)
    handle(WorkerJoined(a_worker("prefill-0", prefill_cost=cost)), 0.0)
    handle(WorkerJoined(a_worker("decode-0")), 0.0)
    handle(RequestArrived(a_request("cmpl-1")), 0.0)
    handle(RequestArrived(a_request("cmpl-2")), 0.0)
    granted = DecodeReserved(
        request_id=RequestId("cmpl-1"), landing=a_landing("decode-0"), expires_s=60.0
    )
    handle(MessageReceived(WorkerId("decode-0"), granted), 0.0)
    done = PrefillDone(
        request_id=RequestId("cmpl-1"),
        first_token=1,
        finish="",
        n_cached=0,
        queue_s=0.0,
        compute_s=4.0,
        drain_s=0.0,
    )
    handle(MessageReceived(WorkerId("prefill-0"), done), 4.0)
    handle(RequestFinished(RequestId("cmpl-1"), 11), 4.0 + 10 * 0.022)  # said: 0.011
    return observer


Ask = Callable[[str], Awaitable[httpx.Response]]


@pytest.fixture
async def ask(observer: CoreObserver) -> AsyncIterator[Ask]:
    clock = FakeClock(5.0)
    shell = Shell(observer.core, clock)
    links = WorkerLinks(
        MemoryNetwork(),
        MemoryStore(),
        ConductorId("conductor-0"),
        shell,
        CoreGateway(shell),
        ClusterMetrics(observer.core, CollectorRegistry()),
    )
    app = debug_app(observer, links, clock, ConductorInfo("conductor-0"), {"cmpl-1": "4bf9"}.get)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://conductor") as client:
        yield client.get


async def test_a_placement_and_a_refusal_come_with_their_tables_and_the_reason(
    ask: Ask,
) -> None:
    placed, refused = (await ask("/decisions")).json()["decisions"]
    assert (placed["request_id"], placed["outcome"], placed["reason"]) == ("cmpl-1", "placed", "")
    assert placed["placement"]["chosen"]["ttft_s"] == 2.0
    assert placed["prefill_load"] == pytest.approx(2.0 / 2.5)
    assert (refused["request_id"], refused["outcome"]) == ("cmpl-2", "refused")
    assert refused["placement"]["estimates"][0]["queue_s"] == pytest.approx(2.0)
    assert "predicted time to first token is 4 s" in refused["reason"]


async def test_decisions_are_found_by_a_part_of_a_request_id(ask: Ask) -> None:
    async def found(text: str) -> list[str]:
        answer = await ask(f"/decisions?request_id={text}")
        return [each["request_id"] for each in answer.json()["decisions"]]

    assert await found("pl-2") == ["cmpl-2"]
    assert await found("cmpl") == ["cmpl-1", "cmpl-2"]
    assert await found("chatcmpl") == []
    answer = await ask(f"/decisions?request_id={'a' * 129}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
    assert "at most 128" in answer.json()["error"]["message"]


async def test_a_traced_request_has_the_id_of_its_trace(ask: Ask) -> None:
    placed, refused = (await ask("/decisions")).json()["decisions"]
    assert (placed["trace_id"], refused["trace_id"]) == ("4bf9", None)


@pytest.mark.parametrize("url", ["javascript:{trace_id}", "http://jaeger/trace"])
def test_a_link_to_traces_is_a_web_address_with_a_place_for_the_id(url: str) -> None:
    with pytest.raises(ValidationError, match="must begin with http"):
        ConductorSettings(model="fake://tiny", trace_url=url)


async def test_activity_is_told_second_by_second_with_workers_that_came(
    ask: Ask, observer: CoreObserver
) -> None:
    answer = (await ask("/activity?after_s=-0")).json()
    assert answer["error"]["param"] == "after_s"
    observer.record(5.0, Tick(), [])
    answer = (await ask("/activity")).json()
    (second,) = answer["seconds"]
    assert (second["at_s"], second["finished"], second["prompt_tokens"]) == (4, 1, 40)
    assert [(e["kind"], e["worker_id"]) for e in answer["events"]] == [
        ("joined", "prefill-0"),
        ("joined", "decode-0"),
    ]


async def test_predictions_are_shown_beside_what_came(ask: Ask) -> None:
    answer = (await ask("/decisions")).json()
    ttft, tbt = answer["errors"]["ttft"], answer["errors"]["tbt"]
    assert (ttft["n"], ttft["predicted_s"], ttft["observed_s"]) == (1, 2.0, 4.0)
    assert tbt["mean_ratio"] == pytest.approx(2.0)
    assert answer["refusals"] == {"ttft": 1}


async def test_a_decision_is_told_in_words_with_what_came_of_it(ask: Ask) -> None:
    placed, refused = (await ask("/decisions")).json()["decisions"]
    assert placed["why"] == (
        "prefill-0: the only one that could; nothing of it is cached; "
        "decode-0 for decode, 11 ms between tokens"
    )
    course = placed["course"]
    assert (course["n_tokens"], course["n_cached"], course["n_new"]) == (40, 0, 11)
    assert (course["ttft_s"], course["compute_s"], course["end"]) == (4.0, 4.0, "finished")
    assert course["tbt_s"] == pytest.approx(0.022)
    assert refused["why"] == refused["reason"]
    assert refused["course"]["end"] == "rejected"


async def test_the_last_few_decisions_can_be_had_alone(ask: Ask) -> None:
    (newest,) = (await ask("/decisions?last=1")).json()["decisions"]
    assert newest["request_id"] == "cmpl-2"
    assert (await ask("/decisions?last=0")).json()["decisions"] == []
    for wrong in ("-1", "x", "1e9", "0.5", "9" * 400):
        answer = await ask(f"/decisions?last={wrong}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "last")


async def test_seconds_are_taken_as_json_writes_them(ask: Ask) -> None:
    for right in ("0", "1.5", "2.2e-311", "1E3"):
        assert (await ask(f"/latencies?after_s={right}")).status_code == 200
    for wrong in ("1_0", "nan", "inf", "1e999", "-1", " 1", "."):
        answer = await ask(f"/latencies?after_s={wrong}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after_s")


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
