"""Prompts that simulated decode workers prefill by themselves: by hand, with faults, again.

Half a second per message; a prompt takes 10 ms a token, a decode step a second. Prefill workers
take 1 s more per pass, so that what decode may do by itself it does.
"""

from typing import Any

import pytest

from halfmoon_protocol.ids import WorkerId
from halfmoon_simulator.cluster.cluster_sim import ClusterSim, WorkerFault
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.results.run_results import SimRequestRecord
from halfmoon_simulator.workloads.traces import TraceRequest
from halfmoon_testing.simulator_inputs import a_trace_request, tiny_costs
from tests.simulator import worlds
from tests.simulator.worlds import audited

#: A block is 1,024 bytes: ten of them take a second.
NARROW = tiny_costs(network_bytes_per_s=1024.0 * 10)


def a_world(*asks: TraceRequest, tbt_slo_s: float | None = None, **more: Any) -> ClusterSim:
    choices = {"placement": "min_ttft", "max_attempts": 50, "tbt_slo_s": tbt_slo_s}
    return worlds.a_world(*asks, choices=choices, **{"local_prefill_tokens": 64, **more})


def records(*asks: TraceRequest, **more: Any) -> list[SimRequestRecord]:
    return audited(a_world(*asks, **more)).records


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


#: The first decodes from 4.5 on, a second a step; three keep the pool busy; the last is short.
BUSY = [
    a_trace_request(n_input=100, n_output=20),
    *(a_trace_request(at_s=6.4, n_input=100, n_output=1, prompt=i) for i in (1, 2, 3)),
    a_trace_request(at_s=6.5, n_input=32, n_output=1, prompt=9),
]
#: A prefix is kept, others keep the pool busy, and the last one begins with it.
CACHED = [
    a_trace_request(n_input=112, shared=5),
    *(a_trace_request(at_s=50.0, n_input=400, n_output=1, prompt=i) for i in (1, 2)),
    a_trace_request(at_s=50.1, n_input=112, prompt=3, shared=5),
]


def test_a_step_with_a_prompt_is_longer_for_those_who_decode() -> None:
    first, *_, short = records(*BUSY)
    assert short.prefill == "decode-0"
    # It is told at 8.0; the step from 8.5 takes 1 s and 0.32 s: a pass costs its second once.
    assert short.first_token_s == pytest.approx(8.5 + 1.32 + 0.5)
    assert first.intervals.max_s == pytest.approx(2.0)  # the first one, with messages' ways
    assert sorted({round(s, 6) for _, s in first.intervals.runs}) == [1.0, 1.32, 2.0]


def test_a_limit_between_tokens_keeps_prompts_out_of_the_batch() -> None:
    # The core expects 1 s of a step and all 1.32 s of the prompt.
    for limit_s, local in ((2.33, 1), (2.31, 0)):
        world = a_world(*BUSY, tbt_slo_s=limit_s)
        audited(world)
        assert n_local(world) == local


def test_a_cached_prefix_is_fetched_and_the_new_blocks_are_kept() -> None:
    world = a_world(*CACHED, a_trace_request(at_s=90.0, n_input=112, prompt=3, shared=5))
    *_, cached, again = audited(world).records
    assert (cached.prefill, cached.n_cached) == ("decode-0", 80)
    assert cached.ttft_s == pytest.approx(1.5 + 1.32 + 0.5)
    assert again.n_cached == 96  # all but the last block: one token is computed
    (kvstore,) = world.kvstores.values()
    assert kvstore.cache.n_leased == kvstore.cache.n_reserved == 0


IN_PARTS: dict[str, Any] = {"local_prefill_tokens": 10_000, "n_pages": 200}


def test_a_decode_worker_lost_while_it_fetches_leaves_no_lease_behind() -> None:
    world = a_world(*CACHED, costs=NARROW, faults=[WorkerFault(51.8, "decode-0", 1.0)])
    while world.event_queue.now < 51.55:
        world.step()
    (kvstore,) = world.kvstores.values()
    assert kvstore.cache.n_leased == 5
    while world.event_queue.now < 51.75:
        world.step()
    assert kvstore.cache.n_leased == 0
    assert kvstore.cache.n_reserved == 2 * 25  # those of the prefill worker


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
    first, _, long = records(
        *asks, **IN_PARTS, local_prefill_step_s=2.48, local_prefill_tbt_s=tbt_s
    )
    assert (long.prefill, long.outcome) == ("decode-0", "finished")
    steps = [round(seconds, 6) for n, seconds in first.intervals.runs for _ in range(n)]
    parts = [i for i, seconds in enumerate(steps) if seconds == 1.48]
    assert len(parts) == 2
    assert parts[1] - parts[0] - 1 == n_between


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
