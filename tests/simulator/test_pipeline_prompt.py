"""Groups of prefill workers in the simulated cluster: by hand, with faults, the same again.

Half a second per message; a prompt takes 10 ms a token, in chunks of 50 tokens in a group.
"""

from typing import Any

import pytest

from halfmoon_protocol.messages import PrefillCost
from halfmoon_simulator.cluster.cluster_sim import ClusterSim, WorkerFault
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.costs.cost_file import CostFile
from halfmoon_simulator.results.run_results import SimRequestRecord
from halfmoon_simulator.workloads.traces import TraceRequest
from halfmoon_testing.simulator_inputs import a_trace_request, tiny_costs
from tests.simulator import worlds
from tests.simulator.worlds import audited, hold_nothing


def free_passes(**changes: Any) -> CostFile:
    """Return costs by the token alone."""
    prefill = PrefillCost(c0_s=0.0, c1_s=0.01, c2_s=0.0)
    return tiny_costs(**{"prefill": prefill, "pass_s": 0.0, **changes})


def a_world(*asks: TraceRequest, gain: float = 1.2, **more: Any) -> ClusterSim:
    choices = {"placement": "min_ttft", "max_attempts": 50, "group_least_gain": gain}
    groups: dict[str, Any] = {
        "n_prefill": 2,
        "group_size": 2,
        "group_chunk_tokens": 50,
        "costs": free_passes(),
    }
    return worlds.a_world(*asks, choices=choices, **{**groups, **more})


def records(*asks: TraceRequest, **more: Any) -> list[SimRequestRecord]:
    return audited(a_world(*asks, **more)).records


def test_a_prompt_goes_through_the_stages_chunk_by_chunk() -> None:
    # Start at 1.5. Two chunks at half a second a worker: 0.25 s a stage, three of them.
    (record,) = records(a_trace_request(n_input=100, n_output=1))
    assert record.ttft_s == record.ended_s == pytest.approx(1.5 + 0.75 + 0.5)
    (alone,) = records(a_trace_request(n_input=100), group_size=1)
    assert alone.ttft_s == pytest.approx(1.5 + 1.0 + 0.5)


def test_activations_take_their_time_from_stage_to_stage() -> None:
    # 4,000 bytes a token at 1 MB/s: 0.2 s a chunk, beside KV of 64 bytes a token.
    costs = free_passes(activation_bytes=4000, network_bytes_per_s=1_000_000.0)
    (record,) = records(a_trace_request(n_input=400), costs=costs)
    assert record.ttft_s == pytest.approx(2.0 + 8 * 0.25 + 0.2 + 0.25, abs=0.05)


def test_every_stage_sends_its_layers_to_decode() -> None:
    # 7 blocks are 7,168 bytes: 7.168 s from one host, half of it from each of two, and as long
    # into the one host that they go to.
    slow = free_passes(network_bytes_per_s=1000.0)
    (record,) = records(a_trace_request(n_input=100), costs=slow, n_kvstore=0)
    # From 1.5 on the first alone for 0.25 s; at the end the second has 0.25 s less to share.
    assert record.ttft_s == pytest.approx(1.5 + 7.168 + 0.5, abs=0.3)


def test_a_stage_waits_for_its_next_chunk_rather_than_begin_something_else() -> None:
    grows = free_passes(prefill=PrefillCost(0.0, 0.0, 1e-4))
    # Chunks of 50 take 0.125, 0.375, 0.625 … s a stage, so that the second one has pauses.
    long = a_trace_request(n_input=400)
    (alone,) = records(long, costs=grows)
    others = [a_trace_request(at_s=1.0, n_input=100, prompt=i) for i in (1, 2, 3)]
    first, *_, last = records(long, *others, costs=grows)
    assert last.prefill == "prefill-1"
    assert first.ttft_s == pytest.approx(alone.ttft_s)
    assert last.first_token_s == pytest.approx(first.first_token_s + 1.0)  # type: ignore[operator]


def test_a_group_waits_until_older_prompts_are_computed() -> None:
    olds = [a_trace_request(n_input=50, prompt=i) for i in range(4)]  # half a second, two at each
    *others, long = records(*olds, a_trace_request(at_s=0.01, n_input=400, prompt=9))
    assert sorted(record.ttft_s or 0.0 for record in others) == pytest.approx([2.5, 2.5, 3.0, 3.0])
    assert long.first_token_s == pytest.approx(1.5 + 1.0 + 9 * 0.25 + 0.5)


def test_a_prefix_is_fetched_by_every_stage_and_computed_once() -> None:
    asks = [
        a_trace_request(n_input=200, shared=8),
        a_trace_request(at_s=50.0, n_input=200, shared=8, prompt=1),
    ]
    world = a_world(*asks, gain=1.0)
    first, second = audited(world).records
    assert (first.n_cached, second.n_cached) == (0, 128)
    assert first.ttft_s == pytest.approx(2.0 + 5 * 0.25)
    # 72 tokens: chunks of 50 and 22.
    assert second.ttft_s == pytest.approx(2.0 + 0.36 + 0.25)
    assert sum(k.cache.n_stored for k in world.kvstores.values()) == 12 + 4
    assert all(k.cache.n_leased == k.cache.n_reserved == 0 for k in world.kvstores.values())


@pytest.mark.parametrize("lost", ["prefill-0", "prefill-1"])
def test_a_member_lost_on_the_way_costs_a_try_and_frees_the_others(lost: str) -> None:
    world = a_world(a_trace_request(n_input=400), faults=[WorkerFault(2.0, lost)])
    (record,) = audited(world).records
    assert (record.outcome, record.attempts) == ("finished", 2)
    assert record.prefill not in ("", lost)
    hold_nothing(world)


def test_workers_left_over_are_in_no_group() -> None:
    costs = tiny_costs()
    spec = ClusterSpec(n_prefill=5, group_size=2)
    stages = [spec.stage(index, costs) for index in range(5)]
    found = [f"{stage.group} {stage.index}" if stage else "" for stage in stages]
    assert found == ["group-0 0", "group-0 1", "group-1 0", "group-1 1", ""]
    with pytest.raises(ValueError, match="group_size is 0"):
        ClusterSpec(group_size=0)
