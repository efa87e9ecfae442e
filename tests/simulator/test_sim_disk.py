"""The disk below a simulated kvstore's memory. A block has 16 tokens and 1,024 bytes.

Eight prompts of four whole blocks come one after the other, then all of them again, and once more.
"""

from typing import Any

import pytest

from halfmoon_simulator.cluster.cluster_sim import ClusterSim
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.results.run_results import RunResult
from halfmoon_simulator.workloads.traces import TraceRequest
from halfmoon_testing.simulator_inputs import a_trace_request
from tests.simulator import worlds
from tests.simulator.worlds import text_of

BLOCK_BYTES = 1024
#: Four blocks of each may come from a cache when the prompt is seen again.
ASKS = [
    a_trace_request(15.0 * (8 * lap + i), n_input=70, prompt=i)
    for lap in range(3)
    for i in range(8)
]
#: Memory for two prompts, and for all.
FEW, ALL = 12, 100


#: Room for a put while what was put before is still being written to the disk.
PATIENT = {"promotion_wait_s": 50.0, "high_watermark": 0.6, "low_watermark": 0.5}


def a_world(asks: list[TraceRequest], faults: Any = (), **changes: Any) -> ClusterSim:
    return worlds.a_world(*asks, faults=faults, **{"disk_bytes_per_s": 8e3, **PATIENT, **changes})


def finished(world: ClusterSim) -> RunResult:
    result = world.run()
    world.check()
    return result


def over_disk(asks: list[TraceRequest] = ASKS, **changes: Any) -> RunResult:
    disk = {"n_slots": FEW, "disk_bytes": ALL * BLOCK_BYTES}
    return finished(a_world(asks, **{**disk, **changes}))


def test_a_disk_for_all_blocks_hits_as_often_as_a_memory_for_all() -> None:
    small = over_disk(disk_bytes=0.0).summary()
    both = over_disk().summary()
    large = over_disk(n_slots=ALL, disk_bytes=0.0).summary()
    assert small.reused < both.reused == large.reused > 0.5
    assert large.ttft_s.mean < both.ttft_s.mean < small.ttft_s.mean
    assert (large.n_from_memory, large.n_from_disk) == (16 * 4, 0)
    assert both.n_from_disk > 0
    assert both.n_from_memory + both.n_from_disk == 16 * 4


def test_a_disk_that_is_not_needed_changes_no_result() -> None:
    assert text_of(over_disk(n_slots=ALL)) == text_of(over_disk(n_slots=ALL, disk_bytes=0.0))


def test_what_the_disk_does_not_bring_in_time_is_computed() -> None:
    patient = over_disk(read_ahead=0).summary()
    hasty = over_disk(read_ahead=0, promotion_wait_s=0.3).summary()
    assert hasty.n_from_disk < patient.n_from_disk
    assert hasty.reused < patient.reused
    assert hasty.n_finished == patient.n_finished == len(ASKS)


@pytest.mark.parametrize(
    ("field", "value"), [("disk_bytes", -1.0), ("disk_bytes_per_s", 0.0), ("read_ahead", -1)]
)
def test_a_disk_that_can_not_be_is_refused_with_its_value(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field} is {value}"):
        ClusterSpec(**{field: value})
