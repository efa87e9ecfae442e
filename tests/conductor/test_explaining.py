"""What operators can ask the conductor about its decisions: `/debug/decisions`, `/metrics`."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from halfmoon_conductor.core_metrics import CoreMetrics
from halfmoon_conductor.debug import debug_app
from halfmoon_conductor.gateway import Gateway
from halfmoon_conductor.hub import Hub
from halfmoon_conductor.prediction_metrics import PredictionMetrics
from halfmoon_conductor.shell import Shell
from halfmoon_metadata import MemoryStore
from halfmoon_protocol.ids import ConductorId, RequestId, WorkerId
from halfmoon_protocol.messages import DecodeReserved, PrefillCost, PrefillDone
from halfmoon_runtime.clock import FakeClock
from halfmoon_runtime.memory_network import MemoryNetwork
from halfmoon_scheduling.conductor import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    MessageReceived,
    RequestArrived,
    RequestFinished,
    WorkerJoined,
)
from halfmoon_scheduling.testing import a_landing, a_request, a_worker


@pytest.fixture
def core() -> Conductor:
    """One request served, in twice the time that was predicted, and one refused."""
    core = Conductor(SchedulingConfig(admission="early", ttft_slo_s=2.5))
    cost = PrefillCost(c0_s=2.0, c1_s=0.0)
    core.handle(WorkerJoined(a_worker("prefill-0", prefill_cost=cost)), 0.0)
    core.handle(WorkerJoined(a_worker("decode-0")), 0.0)
    core.handle(RequestArrived(a_request("cmpl-1")), 0.0)
    core.handle(RequestArrived(a_request("cmpl-2")), 0.0)
    granted = DecodeReserved(
        request_id=RequestId("cmpl-1"), landing=a_landing("decode-0"), expires_s=60.0
    )
    core.handle(MessageReceived(WorkerId("decode-0"), granted), 0.0)
    done = PrefillDone(
        request_id=RequestId("cmpl-1"),
        first_token=1,
        finish="",
        n_cached=0,
        queue_s=0.0,
        compute_s=4.0,
        drain_s=0.0,
    )
    core.handle(MessageReceived(WorkerId("prefill-0"), done), 4.0)
    core.handle(RequestFinished(RequestId("cmpl-1"), 11), 4.0 + 10 * 0.022)  # said: 0.011
    return core


@pytest.fixture
def hub(core: Conductor) -> Iterator[Hub]:
    shell = Shell(core, FakeClock())
    gateway = Gateway(shell)
    yield Hub(
        MemoryNetwork(),
        MemoryStore(),
        ConductorId("conductor-0"),
        shell,
        gateway,
        CoreMetrics(core, CollectorRegistry()),
    )


async def decisions(core: Conductor, hub: Hub) -> dict[str, Any]:
    transport = httpx.ASGITransport(app=debug_app(core, hub))
    async with httpx.AsyncClient(transport=transport, base_url="http://conductor") as client:
        answer = (await client.get("/decisions")).json()
        assert isinstance(answer, dict)
        return answer


async def test_a_placement_and_a_refusal_come_with_their_tables_and_the_reason(
    core: Conductor, hub: Hub
) -> None:
    placed, refused = (await decisions(core, hub))["decisions"]
    assert (placed["request_id"], placed["outcome"], placed["reason"]) == ("cmpl-1", "placed", "")
    assert placed["placement"]["chosen"]["ttft_s"] == 2.0
    assert placed["prefill_load"] == pytest.approx(2.0 / 2.5)
    assert (refused["request_id"], refused["outcome"]) == ("cmpl-2", "refused")
    assert refused["placement"]["estimates"][0]["queue_s"] == pytest.approx(2.0)
    assert "predicted time to first token is 4 s" in refused["reason"]


async def test_predictions_are_shown_beside_what_came(core: Conductor, hub: Hub) -> None:
    answer = await decisions(core, hub)
    ttft, tbt = answer["errors"]["ttft"], answer["errors"]["tbt"]
    assert (ttft["n"], ttft["predicted_s"], ttft["observed_s"]) == (1, 2.0, 4.0)
    assert tbt["mean_ratio"] == pytest.approx(2.0)
    assert answer["refusals"] == {"ttft": 1}


def test_prediction_errors_and_refusals_are_metrics(core: Conductor) -> None:
    registry = CollectorRegistry()
    PredictionMetrics(core, registry)
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        'halfmoon_prediction_error_ratio_bucket{le="1.5625",quantity="ttft"} 0.0',
        'halfmoon_prediction_error_ratio_bucket{le="2.5",quantity="ttft"} 1.0',
        'halfmoon_prediction_error_ratio_bucket{le="+Inf",quantity="ttft"} 1.0',
        'halfmoon_prediction_error_ratio_count{quantity="tbt"} 1.0',
        'halfmoon_refusals_total{lacking="ttft"} 1.0',
    ):
        assert line in lines, line
