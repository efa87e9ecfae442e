"""Prompts that simulated decode workers prefill by themselves: by hand, with faults, again.

Half a second per message; a prompt takes 10 ms a token, a decode step a second. Prefill workers
take 1 s more per pass, so that what decode may do by itself it does.
"""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_protocol.ids import WorkerId
from halfmoon_simulator.cluster.cluster_sim import ClusterSim, WorkerFault
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.results.run_report import results_to_json
from halfmoon_simulator.scenario import scheduling_for_simulation
from halfmoon_simulator.workloads.traces import TraceRequest
from halfmoon_testing.simulator_inputs import a_trace_request, tiny_costs
from tests.simulator.audits import audited


def a_world(
    *asks: TraceRequest,
    costs: Any = None,
    faults: Any = (),
    tbt_slo_s: float | None = None,
    **changes: Any,
) -> ClusterSim:
    shape = {
        "n_prefill": 1,
        "n_decode": 1,
        "block_tokens": 16,
        "max_new_tokens": 100,
        "local_prefill_tokens": 64,
        **changes,
    }
    costs = costs or tiny_costs()
    config = scheduling_for_simulation(
        costs, placement="min_ttft", max_attempts=50, tbt_slo_s=tbt_slo_s
    )
    return ClusterSim(ClusterSpec(**shape), costs, config, asks, faults=faults)


def n_local(world: ClusterSim) -> int:
    return sum(worker.local.n_done for worker in world.decodes.values())


def test_a_busy_pool_is_passed_by_and_one_message_each_way_is_what_is_left() -> None:
    # 100 tokens keep the prefill worker busy from 1.5 to 3.5; the short one does not wait.
    world = a_world(a_trace_request(n_input=100), a_trace_request(at_s=0.1, n_input=16, prompt=1))
    first, second = audited(world).records
    assert (first.prefill, first.ttft_s) == ("prefill-0", 4.0)
    assert (second.prefill, second.decode) == ("decode-0", "decode-0")
    # Reserve, answer, start: 1.5. Then 1.16 s of computing, and the token's way.
    assert second.ttft_s == pytest.approx(1.5 + 1.16 + 0.5)
    # Told to go on half a second later; two steps, of which the other may hold up the first.
    assert second.outcome == "finished"
    assert n_local(world) == 1


def test_without_leave_nothing_is_prefilled_there() -> None:
    world = a_world(
        a_trace_request(n_input=100),
        a_trace_request(at_s=0.1, n_input=16, prompt=1),
        local_prefill_tokens=0,
    )
    assert [r.prefill for r in audited(world).records] == ["prefill-0", "prefill-0"]


def test_a_step_with_a_prompt_is_longer_for_those_who_decode() -> None:
    # The first decodes from 4.5 on, a second a step; the second is computed with the step that
    # begins at 8.5, beside 3 others that keep the pool busy.
    asks = [a_trace_request(n_input=100, n_output=20)]
    asks += [a_trace_request(at_s=6.4, n_input=100, n_output=1, prompt=i) for i in (1, 2, 3)]
    asks += [a_trace_request(at_s=6.5, n_input=32, n_output=1, prompt=9)]
    world = a_world(*asks)
    first, *_, short = audited(world).records
    assert short.prefill == "decode-0"
    # It is told at 8.0; the step from 8.5 takes 1 s and 0.32 s: a pass costs its second once.
    assert short.first_token_s == pytest.approx(8.5 + 1.32 + 0.5)
    assert first.intervals.max_s == pytest.approx(2.0)  # the first one, with messages' ways
    assert sorted({round(s, 6) for _, s in first.intervals.runs}) == [1.0, 1.32, 2.0]


def test_a_limit_between_tokens_keeps_prompts_out_of_the_batch() -> None:
    asks = [a_trace_request(n_input=100, n_output=20)]
    asks += [a_trace_request(at_s=6.4, n_input=100, n_output=1, prompt=i) for i in (1, 2, 3)]
    asks += [a_trace_request(at_s=6.5, n_input=32, n_output=1, prompt=9)]
    # The core expects 1 s of a step and all 1.32 s of the prompt.
    for limit_s, local in ((2.33, 1), (2.31, 0)):
        world = a_world(*asks, tbt_slo_s=limit_s)
        audited(world)
        assert n_local(world) == local


def test_a_cached_prefix_is_fetched_and_the_new_blocks_are_kept() -> None:
    asks = [a_trace_request(n_input=112, shared=5)]
    asks += [a_trace_request(at_s=50.0, n_input=100, n_output=1, prompt=i) for i in (1, 2)]
    asks += [
        a_trace_request(at_s=50.1, n_input=112, prompt=3, shared=5),
        a_trace_request(at_s=90.0, n_input=112, prompt=3, shared=5),
    ]
    world = a_world(*asks)
    records = audited(world).records
    cached = records[3]
    assert (cached.prefill, cached.n_cached) == ("decode-0", 80)
    assert cached.ttft_s == pytest.approx(1.5 + 1.32 + 0.5)
    assert records[4].n_cached == 96  # all but the last block: one token is computed
    (kvstore,) = world.kvstores.values()
    assert kvstore.cache.n_leased == kvstore.cache.n_reserved == 0


def test_prompts_wait_for_each_other_a_step_each() -> None:
    asks = [a_trace_request(n_input=400, n_output=1)]
    asks += [a_trace_request(at_s=0.1, n_input=16, n_output=1, prompt=i) for i in (1, 2)]
    _, second, third = audited(a_world(*asks)).records
    assert second.ttft_s == pytest.approx(2.0 + 1.16)
    assert third.ttft_s == pytest.approx(2.0 + 2 * 1.16)


def test_a_lost_kvstore_fails_what_is_read_from_it() -> None:
    # A block is 1,024 bytes: the prefix takes half a second, from the other host.
    costs = tiny_costs(network_bytes_per_s=1024.0 * 10)
    asks = [a_trace_request(n_input=112, shared=5)]
    asks += [a_trace_request(at_s=50.0, n_input=400, n_output=1, prompt=i) for i in (1, 2)]
    asks += [a_trace_request(at_s=50.1, n_input=112, prompt=3, shared=5)]
    world = a_world(*asks, costs=costs, faults=[WorkerFault(51.8, "kvstore-0")])
    *_, last = audited(world).records
    assert (last.outcome, last.attempts, last.n_cached) == ("finished", 2, 0)


def test_a_lost_decode_worker_costs_a_try() -> None:
    asks = [
        a_trace_request(n_input=400, n_output=1),
        a_trace_request(at_s=0.1, n_input=16, prompt=1),
    ]
    world = a_world(*asks, faults=[WorkerFault(2.0, "decode-1")], n_decode=2)
    _, short = audited(world).records
    assert (short.outcome, short.attempts, short.prefill) == ("finished", 2, "decode-0")


def test_a_decode_worker_lost_while_it_fetches_leaves_no_lease_behind() -> None:
    costs = tiny_costs(network_bytes_per_s=1024.0 * 10)
    asks = [a_trace_request(n_input=112, shared=5)]
    asks += [a_trace_request(at_s=50.0, n_input=400, n_output=1, prompt=i) for i in (1, 2)]
    asks += [a_trace_request(at_s=50.1, n_input=112, prompt=3, shared=5)]
    world = a_world(*asks, costs=costs, faults=[WorkerFault(51.8, "decode-0", 1.0)])
    while world.event_queue.now < 51.55:
        world.step()
    (kvstore,) = world.kvstores.values()
    assert kvstore.cache.n_leased == 5
    while world.event_queue.now < 51.75:
        world.step()
    assert kvstore.cache.n_leased == 0
    assert kvstore.cache.n_reserved == 2 * 25  # those of the prefill worker


def some_asks(seed: int) -> list[TraceRequest]:
    dice = random.Random(seed)
    at_s, asks = 0.0, []
    for i in range(12):
        at_s += dice.choice([0.0, 0.3, 2.0])
        shared = dice.choice([0, 1, 4])
        asks.append(
            a_trace_request(
                at_s, dice.randint(1, 150), dice.randint(1, 30), prompt=i, shared=shared
            )
        )
    return asks


@settings(max_examples=25)
@given(
    st.integers(0, 10**6),
    st.sampled_from([None, 2.0]),
    st.lists(
        st.tuples(
            st.sampled_from(["prefill-0", "decode-0", "decode-1", "kvstore-0"]),
            st.floats(0.0, 40.0),
        ),
        max_size=3,
    ),
)
def test_every_request_ends_once_and_nothing_leaks(
    seed: int, tbt_slo_s: float | None, losses: list[tuple[str, float]]
) -> None:
    world = a_world(
        *some_asks(seed),
        costs=tiny_costs(network_bytes_per_s=3000.0, local_bytes_per_s=9000.0),
        faults=[WorkerFault(at_s, worker, 5.0) for worker, at_s in losses],
        tbt_slo_s=tbt_slo_s,
        n_decode=2,
        n_pages=14,
        n_slots=12,
        max_new_tokens=30,
    )
    result = audited(world)
    if not losses:
        assert {record.outcome for record in result.records} == {"finished"}
    for _ in range(2000):  # what is on its way after the last token
        world.event_queue.step()
    for prefill in world.prefills.values():
        assert prefill.pages.n_free == 14
    for decode in world.decodes.values():
        assert decode.pages.n_free == 14
    for kvstore in world.kvstores.values():
        assert kvstore.cache.n_reserved == kvstore.cache.n_leased == 0


def test_the_same_run_gives_the_same_bytes() -> None:
    faults = [WorkerFault(12.0, "decode-0", 5.0)]
    texts = {
        results_to_json(
            [("run", a_world(*some_asks(5), faults=faults, n_decode=2).run())], with_requests=True
        )
        for _ in range(3)
    }
    assert len(texts) == 1


@pytest.mark.parametrize(("tbt_s", "n_between"), [(0.0, 0), (1.2, 2)])
def test_a_long_prompt_is_computed_in_parts_with_steps_between_them(
    tbt_s: float, n_between: int
) -> None:
    # Beside steps of 1 s there is room for 48 tokens, 0.48 s: a pass costs its second once. At a
    # limit of 1.2 s each step pays 0.2 s of that, the one with the part in it as well.
    asks = [
        a_trace_request(n_input=16, n_output=60),
        a_trace_request(at_s=10.1, n_input=2000, n_output=1, prompt=2),
        a_trace_request(at_s=10.2, n_input=96, n_output=1, prompt=1),
    ]
    world = a_world(
        *asks,
        local_prefill_tokens=10_000,
        local_prefill_step_s=2.48,
        local_prefill_tbt_s=tbt_s,
        n_pages=200,
    )
    first, _, long = audited(world).records
    assert (long.prefill, long.outcome) == ("decode-0", "finished")
    steps = [round(seconds, 6) for n, seconds in first.intervals.runs for _ in range(n)]
    parts = [i for i, seconds in enumerate(steps) if seconds == 1.48]
    assert len(parts) == 2
    assert parts[1] - parts[0] - 1 == n_between


def test_alone_at_a_worker_parts_follow_each_other() -> None:
    asks = [
        a_trace_request(n_input=2000, n_output=1, prompt=2),
        a_trace_request(at_s=0.1, n_input=96, n_output=1, prompt=1),
    ]
    world = a_world(
        *asks,
        local_prefill_tokens=10_000,
        local_prefill_step_s=1.48,
        local_prefill_tbt_s=1.2,
        n_pages=200,
        n_decode=2,
    )
    _, long = audited(world).records
    assert long.prefill == "decode-1"
    assert long.ttft_s == pytest.approx(2.0 + 2 * 1.48)  # a pass each


def test_kvstores_stand_on_the_hosts_of_decode_workers_too() -> None:
    asks = [
        a_trace_request(n_input=400, n_output=1),
        a_trace_request(at_s=0.1, n_input=48, n_output=1, prompt=1),
    ]
    world = a_world(*asks, n_kvstore=2)
    audited(world)
    for _ in range(200):  # blocks are kept after the answer
        world.event_queue.step()
    beside = world.kvstores[WorkerId("kvstore-1")]
    assert beside.host == world.decodes[WorkerId("decode-0")].host
    assert beside.cache.n_stored == 3
    with pytest.raises(ValueError, match="n_kvstore is 3; one kvstore stands on a host"):
        ClusterSpec(n_prefill=1, n_decode=1, n_kvstore=3)
