"""Groups of prefill workers in the simulated cluster: by hand, with faults, the same again.

Half a second per message; a prompt takes 10 ms a token, in chunks of 50 tokens in a group.
"""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_protocol.messages import PrefillCost
from halfmoon_simulator.cluster.cluster_sim import ClusterSim, WorkerFault
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.results.run_report import results_to_json
from halfmoon_simulator.scenario import scheduling_for_simulation
from halfmoon_simulator.workloads.traces import TraceRequest
from halfmoon_testing.simulator_inputs import a_trace_request, tiny_costs
from tests.simulator.audits import audited

FREE = PrefillCost(c0_s=0.0, c1_s=0.01, c2_s=0.0)


def a_world(
    *asks: TraceRequest, costs: Any = None, faults: Any = (), gain: float = 1.2, **changes: Any
) -> ClusterSim:
    shape = {
        "n_prefill": 2,
        "n_decode": 1,
        "block_tokens": 16,
        "max_new_tokens": 100,
        "group_size": 2,
        "group_chunk_tokens": 50,
        **changes,
    }
    costs = costs or tiny_costs(prefill=FREE, pass_s=0.0)
    config = scheduling_for_simulation(
        costs, placement="min_ttft", max_attempts=50, group_least_gain=gain
    )
    return ClusterSim(ClusterSpec(**shape), costs, config, asks, faults=faults)


def test_a_prompt_goes_through_the_stages_chunk_by_chunk() -> None:
    # Start at 1.5. Two chunks at half a second a worker: 0.25 s a stage, three of them.
    (record,) = audited(a_world(a_trace_request(n_input=100))).records
    assert record.ttft_s == pytest.approx(1.5 + 0.75 + 0.5)
    (alone,) = audited(a_world(a_trace_request(n_input=100), group_size=1)).records
    assert alone.ttft_s == pytest.approx(1.5 + 1.0 + 0.5)


def test_four_stages_fill_for_longer_and_share_more() -> None:
    world = a_world(a_trace_request(n_input=400), n_prefill=4, group_size=4)
    (record,) = audited(world).records
    assert record.ttft_s == pytest.approx(2.0 + (8 + 3) * 0.125)
    assert [round(worker.busy_s, 9) for worker in world.prefills.values()] == [1.0] * 4


def test_activations_take_their_time_from_stage_to_stage() -> None:
    # 4,000 bytes a token at 1 MB/s: 0.2 s a chunk, beside KV of 64 bytes a token.
    costs = tiny_costs(
        prefill=FREE, pass_s=0.0, activation_bytes=4000, network_bytes_per_s=1_000_000.0
    )
    (record,) = audited(a_world(a_trace_request(n_input=400), costs=costs)).records
    assert record.ttft_s == pytest.approx(2.0 + 8 * 0.25 + 0.2 + 0.25, abs=0.05)


def test_every_stage_sends_its_layers_to_decode() -> None:
    # 7 blocks are 7,168 bytes: 7.168 s from one host, half of it from each of two, and as long
    # into the one host that they go to.
    slow = tiny_costs(prefill=FREE, pass_s=0.0, network_bytes_per_s=1000.0)
    (record,) = audited(a_world(a_trace_request(n_input=100), costs=slow, n_kvstore=0)).records
    # From 1.5 on the first alone for 0.25 s; at the end the second has 0.25 s less to share.
    assert record.ttft_s == pytest.approx(1.5 + 7.168 + 0.5, abs=0.3)


def test_a_stage_waits_for_its_next_chunk_rather_than_begin_something_else() -> None:
    grows = tiny_costs(prefill=PrefillCost(0.0, 0.0, 1e-4), pass_s=0.0)
    # Chunks of 50 take 0.125, 0.375, 0.625 … s a stage, so that the second one has pauses.
    long = a_trace_request(n_input=400)
    (alone,) = audited(a_world(long, costs=grows)).records
    others = [a_trace_request(at_s=1.0, n_input=100, prompt=i) for i in (1, 2, 3)]
    first, *_, last = audited(a_world(long, *others, costs=grows)).records
    assert last.prefill == "prefill-1"
    assert first.ttft_s == pytest.approx(alone.ttft_s)
    assert last.first_token_s == pytest.approx(first.first_token_s + 1.0)  # type: ignore[operator]


def test_younger_prompts_pass_until_the_first_chunk_is_there() -> None:
    # The second stage is idle for 0.25 s; what takes 0.16 s may go first.
    others = [a_trace_request(at_s=0.01, n_input=16, prompt=i) for i in (1, 2, 3)]
    first, *_, last = audited(a_world(a_trace_request(n_input=400), *others)).records
    assert last.prefill == "prefill-1"
    assert last.ttft_s == pytest.approx(2.0 + 0.16)
    assert first.ttft_s == pytest.approx(2.0 + 9 * 0.25)


def test_a_group_waits_until_older_prompts_are_computed() -> None:
    olds = [a_trace_request(n_input=50, prompt=i) for i in range(4)]  # half a second, two at each
    *others, long = audited(
        a_world(*olds, a_trace_request(at_s=0.01, n_input=400, prompt=9))
    ).records
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


def test_a_prompt_of_one_token_more_needs_no_decode() -> None:
    (record,) = audited(a_world(a_trace_request(n_input=100, n_output=1))).records
    assert record.ended_s == record.first_token_s


@pytest.mark.parametrize("lost", ["prefill-0", "prefill-1"])
def test_a_member_lost_on_the_way_costs_a_try_and_frees_the_others(lost: str) -> None:
    world = a_world(a_trace_request(n_input=400), faults=[WorkerFault(2.0, lost)])
    (record,) = audited(world).records
    assert (record.outcome, record.attempts) == ("finished", 2)
    assert record.prefill not in ("", lost)
    for prefill in world.prefills.values():
        assert len(prefill.staging) == 0
        assert prefill.pages.n_free == prefill.pages.n_pages


def test_a_lost_kvstore_fails_what_stages_read_from_it() -> None:
    costs = tiny_costs(prefill=FREE, pass_s=0.0, local_bytes_per_s=100.0)  # reads take 40 s
    asks = [
        a_trace_request(n_input=200, shared=8),
        a_trace_request(at_s=100.0, n_input=200, shared=8, prompt=1),
    ]
    world = a_world(
        *asks, costs=costs, gain=1.0, faults=[WorkerFault(103.0, "kvstore-0")], n_kvstore=1
    )
    _, second = audited(world).records
    assert (second.outcome, second.attempts, second.n_cached) == ("finished", 2, 0)


def some_asks(seed: int) -> list[TraceRequest]:
    dice = random.Random(seed)
    at_s, asks = 0.0, []
    for i in range(10):
        at_s += dice.choice([0.0, 0.3, 2.0])
        shared = dice.choice([0, 1, 4])
        asks.append(
            a_trace_request(
                at_s, dice.randint(1, 200), dice.randint(1, 30), prompt=i, shared=shared
            )
        )
    return asks


@settings(max_examples=25)
@given(
    st.integers(0, 10**6),
    st.integers(2, 3),
    st.lists(
        st.tuples(
            st.sampled_from(["prefill-0", "prefill-1", "prefill-2", "decode-0", "kvstore-0"]),
            st.floats(0.0, 40.0),
        ),
        max_size=3,
    ),
)
def test_every_request_ends_once_and_nothing_leaks(
    seed: int, group_size: int, losses: list[tuple[str, float]]
) -> None:
    costs = tiny_costs(
        prefill=FREE,
        pass_s=0.0,
        activation_bytes=20,
        network_bytes_per_s=3000.0,
        local_bytes_per_s=9000.0,
    )
    world = a_world(
        *some_asks(seed),
        costs=costs,
        gain=1.0,
        faults=[WorkerFault(at_s, worker, 5.0) for worker, at_s in losses],
        n_prefill=3,
        n_decode=2,
        group_size=group_size,
        n_pages=16,
        n_slots=14,
        max_new_tokens=30,
    )
    result = audited(world)
    assert {record.outcome for record in result.records} <= {"finished", "rejected", "failed"}
    if not losses:
        assert {record.outcome for record in result.records} == {"finished"}
    for _ in range(2000):  # what is on its way after the last token
        world.event_queue.step()
    for prefill in world.prefills.values():
        assert len(prefill.staging) == 0
        assert prefill.pages.n_free == 16
    for kvstore in world.kvstores.values():
        assert kvstore.cache.n_reserved == kvstore.cache.n_leased == 0
    world.check()


def test_the_same_run_gives_the_same_bytes() -> None:
    faults = [WorkerFault(6.0, "prefill-1", 5.0)]
    texts = {
        results_to_json([("run", a_world(*some_asks(5), gain=1.0, faults=faults).run())])
        for _ in range(3)
    }
    assert len(texts) == 1


def test_workers_left_over_are_in_no_group() -> None:
    costs = tiny_costs()
    spec = ClusterSpec(n_prefill=5, group_size=2)
    stages = [spec.stage(index, costs) for index in range(5)]
    assert [stage and (stage.group, stage.index) for stage in stages] == [
        ("group-0", 0),
        ("group-0", 1),
        ("group-1", 0),
        ("group-1", 1),
        None,
    ]
    with pytest.raises(ValueError, match="group_size is 0"):
        ClusterSpec(group_size=0)
