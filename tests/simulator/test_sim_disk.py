"""The disk below a simulated kvstore's memory. A block has 16 tokens and 1,024 bytes.

Eight prompts of four whole blocks come one after the other, then all of them again, and once more.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_simulator.cluster.cluster_sim import ClusterSim, WorkerFault
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.results.run_report import results_to_json
from halfmoon_simulator.results.run_results import RunResult
from halfmoon_simulator.scenario import scheduling_for_simulation
from halfmoon_simulator.workloads.traces import TraceRequest
from halfmoon_testing.simulator_inputs import a_trace_request, tiny_costs
from tests.simulator.audits import audited

BLOCK_BYTES = 1024
#: Four blocks of each may come from a cache when the prompt is seen again.
ASKS = [
    a_trace_request(15.0 * (8 * lap + i), n_input=70, prompt=i)
    for lap in range(3)
    for i in range(8)
]
#: Memory for two prompts, and for all.
FEW, ALL = 12, 100


def a_world(asks: list[TraceRequest] = ASKS, faults: Any = (), **changes: Any) -> ClusterSim:
    costs = tiny_costs()
    spec = ClusterSpec(
        **{
            "n_prefill": 1,
            "n_decode": 1,
            "block_tokens": 16,
            "max_new_tokens": 100,
            "disk_bytes_per_s": 8e3,
            "promotion_wait_s": 50.0,
            # Room for a put while what was put before is still being written to the disk.
            "high_watermark": 0.6,
            "low_watermark": 0.5,
            **changes,
        }
    )
    return ClusterSim(spec, costs, scheduling_for_simulation(costs), asks, faults=faults)


def finished(world: ClusterSim) -> RunResult:
    result = world.run()
    world.check()
    return result


def test_a_disk_for_all_blocks_hits_as_often_as_a_memory_for_all() -> None:
    small = finished(a_world(n_slots=FEW)).summary()
    over_disk = finished(a_world(n_slots=FEW, disk_bytes=ALL * BLOCK_BYTES)).summary()
    large = finished(a_world(n_slots=ALL)).summary()
    assert small.reused < over_disk.reused == large.reused > 0.5
    assert large.ttft_s.mean < over_disk.ttft_s.mean < small.ttft_s.mean
    assert (large.n_from_memory, large.n_from_disk) == (16 * 4, 0)
    assert over_disk.n_from_disk > 0
    assert over_disk.n_from_memory + over_disk.n_from_disk == 16 * 4


def test_a_disk_that_is_not_needed_changes_no_result() -> None:
    without = results_to_json([("", finished(a_world(n_slots=ALL)))], with_requests=True)
    unused = finished(a_world(n_slots=ALL, disk_bytes=ALL * BLOCK_BYTES))
    assert results_to_json([("", unused)], with_requests=True) == without


def test_a_slower_disk_takes_longer() -> None:
    def ttft_s(**changes: float) -> float:
        fields: dict[str, Any] = {
            "n_slots": FEW,
            "disk_bytes": ALL * BLOCK_BYTES,
            **changes,
        }
        return finished(a_world(**fields)).summary().ttft_s.mean

    fast_s = ttft_s()
    assert ttft_s(disk_bytes_per_s=4e3) > fast_s
    assert ttft_s(disk_latency_s=0.5) > fast_s


def test_what_the_disk_does_not_bring_in_time_is_computed() -> None:
    fields: dict[str, Any] = {
        "n_slots": FEW,
        "disk_bytes": ALL * BLOCK_BYTES,
        "read_ahead": 0,
    }
    patient = finished(a_world(**fields)).summary()
    hasty = finished(a_world(**fields, promotion_wait_s=0.3)).summary()
    assert hasty.n_from_disk < patient.n_from_disk
    assert hasty.reused < patient.reused
    assert hasty.n_finished == patient.n_finished == len(ASKS)


def test_a_reader_whose_kvstore_is_lost_while_its_disk_reads_computes_the_prompt() -> None:
    again_s = ASKS[8].at_s + 1.6  # the disk takes a second and more
    world = a_world(
        ASKS[:9],
        faults=[WorkerFault(again_s, "kvstore-0")],
        n_slots=FEW,
        disk_bytes=ALL * BLOCK_BYTES,
        disk_latency_s=5.0,
    )
    record = finished(world).records[-1]
    assert (record.outcome, record.n_cached, record.attempts) == ("finished", 0, 1)


def test_a_group_of_workers_reads_from_the_disk_too() -> None:
    fields: dict[str, Any] = {
        "n_prefill": 2,
        "group_size": 2,
        "group_chunk_tokens": 16,
        "n_kvstore": 1,
    }
    asks = [TraceRequest(a.at_s, 70, 3, a.blocks) for a in ASKS]
    over_disk = finished(a_world(asks, n_slots=FEW, disk_bytes=ALL * BLOCK_BYTES, **fields))
    assert over_disk.summary().n_from_disk > 0
    assert all(record.outcome == "finished" for record in over_disk.records)


@pytest.mark.parametrize(
    ("field", "value"), [("disk_bytes", -1.0), ("disk_bytes_per_s", 0.0), ("read_ahead", -1)]
)
def test_a_disk_that_can_not_be_is_refused_with_its_value(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field} is {value}"):
        ClusterSpec(**{field: value})


@settings(max_examples=10, deadline=None)
@given(
    asks=st.lists(
        st.builds(
            a_trace_request,
            at_s=st.floats(0.0, 40.0),
            n_input=st.integers(1, 90),
            prompt=st.integers(0, 5),
            shared=st.integers(0, 3),
        ),
        min_size=1,
        max_size=12,
    ),
    n_slots=st.integers(6, 20),
    n_disk=st.integers(1, 30),
    wait_s=st.sampled_from([0.2, 50.0]),
    lost=st.none() | st.sampled_from(["kvstore-0", "prefill-0"]),
)
def test_every_request_ends_whatever_memory_and_disk_hold(
    asks: list[TraceRequest], n_slots: int, n_disk: int, wait_s: float, lost: str | None
) -> None:
    asks = sorted(asks, key=lambda ask: ask.at_s)
    faults = [] if lost is None else [WorkerFault(20.0, lost, 5.0)]
    world = a_world(
        asks,
        faults,
        n_prefill=2,
        n_slots=n_slots,
        disk_bytes=n_disk * BLOCK_BYTES,
        promotion_wait_s=wait_s,
    )
    result = audited(world)
    assert all(record.outcome == "finished" for record in result.records)
