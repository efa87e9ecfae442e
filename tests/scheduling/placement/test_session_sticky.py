"""The mode that keeps a session on its worker: by hand, and in a conductor from event to event."""

import httpx
import pytest
from prometheus_client import CollectorRegistry

from halfmoon_conductor.generation.core_gateway import CoreGateway
from halfmoon_conductor.observability.history.latency_history import LatencyHistory
from halfmoon_conductor.observability.history.observer import CoreObserver
from halfmoon_conductor.observability.metrics.cluster_metrics import ClusterMetrics
from halfmoon_conductor.page.cluster_view import ConductorInfo
from halfmoon_conductor.page.debug_routes import debug_app
from halfmoon_conductor.workers.shell import Shell
from halfmoon_conductor.workers.worker_links import WorkerLinks
from halfmoon_metadata import MemoryStore
from halfmoon_protocol.ids import BlockHash, ConductorId, RequestId, WorkerId
from halfmoon_protocol.messages import DecodeReserved, PrefillCost
from halfmoon_runtime.channels.memory_network import MemoryNetwork
from halfmoon_runtime.clock import FakeClock
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    MessageReceived,
    Request,
    RequestArrived,
    WorkerJoined,
)
from halfmoon_scheduling.placement.estimates import Estimate, Placement, PlacementRequest
from halfmoon_scheduling.placement.modes import open_placement_mode
from halfmoon_scheduling.placement.modes.session_sticky import MAX_PROMPTS, SessionSticky
from halfmoon_scheduling.placement.placement_explanations import (
    explain_placement,
    explain_rejected_candidate,
)
from halfmoon_scheduling.placement.placement_mode import ModeSettings, PlacementMode
from halfmoon_simulator.cluster.cluster_sim import ClusterSim
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.scenario import scheduling_for_simulation
from halfmoon_testing.scheduling_inputs import a_landing, a_prefill_done, a_request, a_worker
from halfmoon_testing.simulator_inputs import a_trace_request, tiny_costs

P0, P1, D0 = WorkerId("prefill-0"), WorkerId("prefill-1"), WorkerId("decode-0")


def hashes(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(bytes([number]) * 16) for number in numbers)


def job(*blocks: int) -> PlacementRequest:
    return PlacementRequest(RequestId("cmpl-1"), 100, 11, 10, 100, hashes(*blocks))


def row(worker: WorkerId, ttft_s: float) -> Estimate:
    return Estimate(worker, None, 0, None, 0, 0, 0.0, 0.0, ttft_s, ttft_s)


def place(
    mode: PlacementMode,
    blocks: tuple[int, ...],
    ttfts: tuple[float, float],
    slo_s: float | None = None,
) -> Placement:
    rows = (row(P0, ttfts[0]), row(P1, ttfts[1]))
    chosen, preferred = mode.choose(job(*blocks), rows, lambda _: slo_s)
    return Placement(chosen, D0, 0.05, rows, preferred)


@pytest.fixture
def mode() -> PlacementMode:
    """A mode that knows one prompt, of blocks 1 and 2, prefilled by prefill-1."""
    mode = open_placement_mode("session_sticky")
    mode.on_prefill_done(hashes(1, 2), P1)
    return mode


def test_a_prompt_that_continues_another_goes_to_its_worker(mode: PlacementMode) -> None:
    assert place(mode, (1, 2, 3, 4), (1.0, 1.1)).prefill == P1
    assert place(mode, (1, 2), (1.0, 1.1)).prefill == P1


def test_a_prompt_with_only_its_first_block_in_common_is_another_session(
    mode: PlacementMode,
) -> None:
    placement = place(mode, (1, 3, 4), (1.0, 1.1))
    assert (placement.prefill, placement.preferred) == (P0, None)


def test_the_longest_known_beginning_decides(mode: PlacementMode) -> None:
    mode.on_prefill_done(hashes(1, 2, 3), P0)
    assert place(mode, (1, 2, 3, 4), (1.1, 1.0)).prefill == P0
    assert place(mode, (1, 2, 9), (1.0, 1.1)).prefill == P1


def test_a_session_leaves_a_worker_that_is_slower_by_more_than_the_factor(
    mode: PlacementMode,
) -> None:
    assert place(mode, (1, 2, 3), (1.0, 1.2)).prefill == P1
    placement = place(mode, (1, 2, 3), (1.0, 1.21))
    assert (placement.prefill, placement.preferred) == (P0, P1)


def test_a_session_leaves_a_worker_that_would_break_the_limit(mode: PlacementMode) -> None:
    assert place(mode, (1, 2, 3), (1.0, 1.2), slo_s=1.2).prefill == P1
    assert place(mode, (1, 2, 3), (1.0, 1.2), slo_s=1.1).prefill == P0


def test_a_session_whose_worker_is_gone_takes_the_soonest(mode: PlacementMode) -> None:
    mode.on_prefill_done(hashes(1, 2), WorkerId("prefill-9"))
    assert place(mode, (1, 2, 3), (1.1, 1.0)).prefill == P1


def test_prompts_without_a_full_block_are_no_session(mode: PlacementMode) -> None:
    mode.on_prefill_done((), P0)
    assert place(mode, (), (1.1, 1.0)).preferred is None


def test_the_oldest_prompts_are_forgotten() -> None:
    mode = SessionSticky(ModeSettings())
    names = [BlockHash(number.to_bytes(16, "big")) for number in range(MAX_PROMPTS + 1)]
    for name in names[:MAX_PROMPTS]:
        mode.on_prefill_done([name], P1)
    mode.on_prefill_done(names[:1], P1)  # used again: now the second one is the oldest
    mode.on_prefill_done(names[-1:], P1)
    assert [
        mode.choose(
            PlacementRequest(RequestId("cmpl-1"), 100, 11, 10, 100, (name,)),
            (row(P0, 1.0), row(P1, 1.0)),
            lambda _: None,
        ).preferred
        for name in (names[0], names[1], names[2])
    ] == [P1, None, P1]


def test_choices_say_what_the_session_had_to_do_with_them(mode: PlacementMode) -> None:
    stayed = place(mode, (1, 2, 3), (1.0, 1.1))
    assert explain_placement(stayed, SessionSticky).startswith(
        "prefill-1: served this session last, first token in 1.10 s; "
    )
    assert explain_rejected_candidate(stayed.estimates[0], stayed, SessionSticky) == (
        "100 ms sooner, too little to leave the session's worker"
    )
    left = place(mode, (1, 2, 3), (1.0, 2.0))
    assert explain_placement(left, SessionSticky).startswith(
        "prefill-0: the soonest of 2, first token in 1.00 s; "
        "prefill-1, which served this session last, is too late; "
    )
    assert explain_rejected_candidate(left.estimates[1], left, SessionSticky) == (
        "first token 1.00 s later (prefill +1.00 s), "
        "too much to stay with the session's last worker"
    )
    new = place(mode, (7,), (1.0, 2.0))
    assert explain_placement(new, SessionSticky).startswith("prefill-0: the soonest of 2, ")
    assert explain_rejected_candidate(new.estimates[1], new, SessionSticky) == (
        "first token 1.00 s later (prefill +1.00 s)"
    )


COST = PrefillCost(c0_s=2.0, c1_s=0.0)


@pytest.fixture
def observer() -> CoreObserver:
    """A conductor after two turns of a session; the first came while prefill-0 was busy."""
    core = Conductor(SchedulingConfig(placement="session_sticky"))
    observer = CoreObserver(core, LatencyHistory())

    def handle(event: AnyEvent, now: float) -> None:
        observer.record(now, event, core.handle(event, now))

    def serve(request: Request, at_s: float) -> None:
        handle(RequestArrived(request), at_s)
        decode = MessageReceived(
            D0,
            DecodeReserved(
                request_id=request.request_id, landing=a_landing("decode-0"), expires_s=at_s + 60.0
            ),
        )
        handle(decode, at_s)

    def finish(request_id: str, worker: WorkerId, now: float) -> None:
        handle(MessageReceived(worker, a_prefill_done(request_id, compute_s=2.0)), now)

    for name in ("prefill-0", "prefill-1"):
        handle(WorkerJoined(a_worker(name, prefill_cost=COST)), 0.0)
    handle(WorkerJoined(a_worker("decode-0")), 0.0)
    serve(a_request("cmpl-1", prompt=1), 0.0)
    serve(a_request("cmpl-2", prompt=2), 0.0)
    finish("cmpl-1", P0, 2.0)
    finish("cmpl-2", P1, 2.0)
    serve(a_request("cmpl-3", prompt=2, n_tokens=60), 5.0)
    return observer


async def test_debug_decisions_explains_that_a_session_stayed(observer: CoreObserver) -> None:
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
    app = debug_app(observer, links, clock, ConductorInfo("conductor-0"))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://conductor") as client:
        first, turn_1, turn_2 = (await client.get("/decisions")).json()["decisions"]
    assert first["why"].startswith("prefill-0: the soonest of 2, first token in 2.00 s; ")
    assert turn_1["why"].startswith("prefill-1: the soonest of 2, first token in 2.00 s; ")
    assert turn_2["why"].startswith("prefill-1: served this session last, first token in 2.00 s; ")
    assert [row["why_not"] for row in turn_2["placement"]["estimates"]] == [
        "as soon, too little to leave the session's worker",
        "",
    ]


def simulate(placement: str) -> list[str]:
    """Why each of three requests was placed; the third one continues the second one."""
    costs = tiny_costs()
    spec = ClusterSpec(n_prefill=2, n_decode=1, n_kvstore=0, block_tokens=16, max_new_tokens=100)
    requests = [
        a_trace_request(prompt=1),
        a_trace_request(prompt=2),
        a_trace_request(at_s=50.0, prompt=2, n_input=150),
    ]
    config = scheduling_for_simulation(costs, placement=placement, kept_decisions=8)
    return [record.why for record in ClusterSim(spec, costs, config, requests).run().records]


def test_the_simulator_explains_that_a_session_stayed() -> None:
    assert simulate("session_sticky")[2].startswith("prefill-1: served this session last, ")
    assert simulate("min_ttft")[2].startswith("prefill-0: the soonest of 2, ")
