"""The simulated cluster: by hand, audited after every event, deterministic, with faults."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfmoon_protocol.messages import DecodeCost
from halfmoon_scheduling.commands import AnyCommand
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import AnyEvent
from halfmoon_scheduling.placement.modes import PLACEMENT_MODES
from halfmoon_simulator.cluster.cluster_sim import BadScenario, ClusterSim, WorkerFault
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.results.run_report import results_to_json
from halfmoon_simulator.scenario import scheduling_for_simulation
from halfmoon_simulator.workloads.traces import TraceRequest
from halfmoon_testing.simulator_inputs import a_trace_request, tiny_costs
from tests.simulator.audits import audited


def spec(**changes: Any) -> ClusterSpec:
    return ClusterSpec(
        **{"n_prefill": 1, "n_decode": 1, "block_tokens": 16, "max_new_tokens": 100, **changes}
    )


def a_world(*asks: TraceRequest, costs: Any = None, **changes: Any) -> ClusterSim:
    costs = costs or tiny_costs()
    return ClusterSim(spec(**changes), costs, scheduling_for_simulation(costs), asks)


def test_one_request_by_hand() -> None:
    """Half a second per message, 2 s of prefill, two steps of 1 s."""
    (record,) = audited(a_world(a_trace_request(at_s=10.0, n_input=100, n_output=3))).records
    # Reserve and answer: 11; start prefill 11.5, computed 13.5, told 14.
    assert record.first_token_s == 14.0
    # Start decode 14.5, steps end at 15.5 and 16.5, tokens are there half a second later.
    assert record.ended_s == 17.0
    assert record.intervals.runs == ((1, 2.0), (1, 1.0))
    assert (record.outcome, record.n_out, record.attempts) == ("finished", 3, 1)


@pytest.mark.parametrize("placement", list(PLACEMENT_MODES))
def test_records_say_why_each_mode_placed_a_request(placement: str) -> None:
    costs = tiny_costs()
    config = scheduling_for_simulation(costs, placement=placement, kept_decisions=8)
    requests = [a_trace_request(prompt=0), a_trace_request(prompt=1)]
    result = audited(ClusterSim(spec(n_prefill=2), costs, config, requests))
    for record in result.records:
        assert record.why.startswith(f"{record.prefill}: ")
        assert record.why.endswith(f"{record.decode} for decode, 1.00 s between tokens")


def test_without_kept_decisions_no_record_is_explained() -> None:
    assert [record.why for record in audited(a_world(a_trace_request())).records] == [""]


def test_a_request_of_one_token_needs_no_decode() -> None:
    world = a_world(a_trace_request(n_output=1))
    (record,) = audited(world).records
    assert record.ended_s == record.first_token_s == 4.0
    assert all(worker.n_steps == 0 for worker in world.decodes.values())


def test_prompts_queue_for_the_worker_and_share_a_pass() -> None:
    first, second = audited(
        a_world(a_trace_request(prompt=0), a_trace_request(prompt=1), chunk_tokens=100)
    ).records
    # One after the other: the second is computed from 3.5 to 5.5.
    assert (first.ttft_s, second.ttft_s) == (4.0, 6.0)
    first, second = audited(
        a_world(a_trace_request(prompt=0), a_trace_request(prompt=1), chunk_tokens=200)
    ).records
    # The first is alone in its pass, which began before the second one came ... at once.
    assert (first.ttft_s, second.ttft_s) == (4.0, 6.0)


def test_a_long_prompt_takes_a_pass_per_chunk() -> None:
    (record,) = audited(a_world(a_trace_request(n_input=100), chunk_tokens=40)).records
    assert record.ttft_s == pytest.approx(4.0 + 2 * 1.0)  # two passes more


def test_a_long_prompt_whose_turn_it_is_takes_fewer_passes() -> None:
    fields = {"chunk_tokens": 40, "max_chunk_s": 3.0}
    (record,) = audited(a_world(a_trace_request(n_input=100), **fields)).records
    assert record.ttft_s == 4.0  # one pass
    fields = {"chunk_tokens": 40, "max_chunk_tokens": 64, "max_chunk_s": 3.0}
    (record,) = audited(a_world(a_trace_request(n_input=100), **fields)).records
    assert record.ttft_s == pytest.approx(4.0 + 1.0)  # one pass more


def test_the_larger_priority_is_computed_first_and_pauses_what_is_under_way() -> None:
    asks = [
        a_trace_request(n_input=120, prompt=0),
        a_trace_request(at_s=1.0, n_input=40, prompt=1),
        a_trace_request(at_s=1.0, n_input=40, prompt=2, priority=1),
    ]
    long, plain, urgent = audited(a_world(*asks, chunk_tokens=40)).records
    assert (urgent.first_token_s or 0) < (long.first_token_s or 0) < (plain.first_token_s or 0)


def test_a_prompt_that_is_due_soon_is_computed_before_one_with_time_left() -> None:
    asks = [
        a_trace_request(n_input=120, prompt=0),
        a_trace_request(at_s=1.0, n_input=40, prompt=1, ttft_slo_s=50.0),
        a_trace_request(at_s=1.0, n_input=40, prompt=2, ttft_slo_s=7.0),
    ]
    by_arrival = audited(a_world(*asks, chunk_tokens=40)).records
    assert [one.meets(None, None) for one in by_arrival] == [True, True, False]
    by_slack = audited(a_world(*asks, chunk_tokens=40, queue_order="slack")).records
    assert [one.meets(None, None) for one in by_slack] == [True, True, True]


def test_pages_are_taken_in_the_order_of_priority() -> None:
    asks = [
        a_trace_request(n_input=150, prompt=0),
        a_trace_request(at_s=1.0, n_input=150, prompt=1),
        a_trace_request(at_s=1.0, n_input=150, prompt=2, priority=1),
    ]
    # A worker has pages for one prompt at a time; there are enough decode workers for all.
    first, plain, urgent = audited(a_world(*asks, n_pages=16, n_decode=3)).records
    assert (first.first_token_s or 0) < (urgent.first_token_s or 0) < (plain.first_token_s or 0)


def test_a_prefix_is_computed_once() -> None:
    world = a_world(
        a_trace_request(at_s=0.0, shared=4), a_trace_request(at_s=50.0, prompt=1, shared=4)
    )
    first, second = audited(world).records
    assert (first.n_cached, second.n_cached) == (0, 64)
    assert first.ttft_s == 4.0
    assert second.ttft_s == pytest.approx(4.0 - 0.64)
    (kvstore,) = world.kvstores.values()
    assert kvstore.cache.n_stored == 6 + 2  # full blocks of both, shared ones once
    assert kvstore.cache.n_reserved == kvstore.cache.n_leased == 0


def test_a_slow_wire_delays_the_first_token() -> None:
    costs = tiny_costs(network_bytes_per_s=1024.0)  # a block a second
    (record,) = audited(a_world(a_trace_request(n_input=100), costs=costs)).records
    assert record.ttft_s == 1.5 + 7.0 + 0.5  # 7 blocks, beside 2 s of computing


def test_decode_steps_grow_with_the_context() -> None:
    costs = tiny_costs(decode=tiny_costs().decode.__class__(1.0, 0.5, 0.01))
    (record,) = audited(a_world(a_trace_request(n_input=100, n_output=4), costs=costs)).records
    # Steps attend to 101, 102 and 103 tokens. The first two are a run, each taken for its
    # mean; the first interval has two messages' ways before it.
    seconds = [seconds for _, seconds in record.intervals.runs]
    assert seconds == pytest.approx([1.0 + 1.5 + 1.015, 1.5 + 1.015, 1.5 + 1.03])
    assert record.ended_s == pytest.approx(4.5 + 3 * 1.5 + 1.01 + 1.02 + 1.03 + 0.5)


def test_a_request_joins_the_batch_between_two_steps() -> None:
    long, short = (
        a_trace_request(n_input=16, n_output=30),
        a_trace_request(at_s=4.2, n_input=16, n_output=2, prompt=1),
    )
    first, second = audited(a_world(long, short)).records
    # The first steps from 3.16 + 0.5 on, once a second; the second may start at 7.86.
    assert first.first_token_s == pytest.approx(3.16)
    assert second.first_token_s == pytest.approx(7.36)
    assert second.ended_s == pytest.approx(8.66 + 1.0 + 0.5)
    assert first.ended_s == pytest.approx(3.66 + 29.0 + 0.5)


def test_a_request_joins_between_two_steps_also_when_they_grow() -> None:
    costs = tiny_costs(decode=DecodeCost(d0_s=1.0, d1_s=0.0, d2_s=0.01))
    long, short = (
        a_trace_request(n_input=16, n_output=30),
        a_trace_request(at_s=4.2, n_input=16, n_output=2, prompt=1),
    )
    _, second = audited(a_world(long, short, costs=costs)).records
    # The first steps from 3.66 on, in 1.17, 1.18 s and so on: the fourth step ends at 8.40.
    # The second may start at 7.86; their first step attends to 21 and to 17 tokens.
    assert second.ended_s == pytest.approx(8.40 + 1.38 + 0.5)


def test_the_next_turn_waits_for_the_one_before() -> None:
    first, second = audited(
        a_world(
            a_trace_request(at_s=1.0, session="s"), a_trace_request(at_s=5.0, prompt=1, session="s")
        )
    ).records
    assert first.ended_s is not None
    assert second.arrived_s == first.ended_s + 5.0


def test_the_conductor_never_learns_how_long_an_answer_is() -> None:
    told: list[int] = []

    def watch(_: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
        request = getattr(event, "request", None)
        if request is not None:
            told.append(request.stopping.max_new_tokens)

    costs = tiny_costs()
    asks = [a_trace_request(n_output=n, prompt=n) for n in (1, 5, 9)]
    ClusterSim(
        spec(max_new_tokens=50), costs, scheduling_for_simulation(costs), asks, watcher=watch
    ).run()
    assert told == [50, 50, 50]


# -- many requests -------------------------------------------------------------------------------


def some_asks(seed: int, n: int = 12) -> list[TraceRequest]:
    dice = random.Random(seed)
    at_s, asks = 0.0, []
    for i in range(n):
        at_s += dice.choice([0.0, 0.3, 2.0])
        n_input = dice.randint(1, 150)
        shared = dice.choice([0, 1, 4])
        session = dice.choice([None, None, "s", "t"])
        asks.append(
            a_trace_request(
                at_s, n_input, dice.randint(1, 40), prompt=i, shared=shared, session=session
            )
        )
    return asks


SMALL = {"n_pages": 14, "n_slots": 12, "max_new_tokens": 40, "chunk_tokens": 64}


@settings(max_examples=25)
@given(
    st.integers(0, 10**6),
    st.sampled_from(list(PLACEMENT_MODES)),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_every_request_ends_once_and_nothing_leaks(
    seed: int, placement: str, n_prefill: int, n_decode: int
) -> None:
    costs = tiny_costs(network_bytes_per_s=3000.0, local_bytes_per_s=9000.0)
    config = scheduling_for_simulation(costs, placement=placement, seed=seed)
    shape = spec(n_prefill=n_prefill, n_decode=n_decode, **SMALL)
    world = ClusterSim(shape, costs, config, some_asks(seed))
    result = audited(world)
    assert len(result.records) == 12
    assert {record.outcome for record in result.records} == {"finished"}
    for _ in range(2000):  # what is on its way after the last token
        world.event_queue.step()
    for prefill in world.prefills.values():
        assert prefill.pages.n_free == 14
        assert len(prefill.machine.queue) == 0
    for decode in world.decodes.values():
        assert decode.pages.n_free == 14
    for kvstore in world.kvstores.values():
        assert kvstore.cache.n_reserved == kvstore.cache.n_leased == 0


@settings(max_examples=25)
@given(
    st.integers(0, 10**6),
    st.lists(
        st.tuples(
            st.sampled_from(["prefill-0", "prefill-1", "decode-0", "decode-1", "kvstore-0"]),
            st.floats(0.0, 60.0),
            st.sampled_from([None, 5.0]),
        ),
        min_size=1,
        max_size=3,
    ),
)
@example(25261, [("prefill-1", 0.0, None), ("decode-0", 3.0, None)])  # two stopped in one pass
def test_lost_workers_lose_no_request(
    seed: int, losses: list[tuple[str, float, float | None]]
) -> None:
    costs = tiny_costs(network_bytes_per_s=3000.0, local_bytes_per_s=9000.0)
    faults = [WorkerFault(at_s, worker, back) for worker, at_s, back in losses]
    shape = spec(n_prefill=2, n_decode=2, **SMALL)
    world = ClusterSim(
        shape,
        costs,
        scheduling_for_simulation(costs, max_attempts=50),
        some_asks(seed),
        faults=faults,
    )
    result = audited(world)
    lost_for_good = {fault.worker_id for fault in faults if fault.back_after_s is None}
    gone = {"prefill-0", "prefill-1"} <= lost_for_good or {"decode-0", "decode-1"} <= lost_for_good
    for record in result.records:
        assert record.outcome
        if not gone:
            # Without anybody of a role for a while, requests are refused or fail, said so.
            assert record.outcome == "finished" or record.reason


def test_a_lost_decode_worker_costs_a_try_and_no_token() -> None:
    costs = tiny_costs()
    asks = [a_trace_request(n_input=16, n_output=20)]
    faults = [WorkerFault(10.0, "decode-0")]
    world = ClusterSim(
        spec(n_decode=2), costs, scheduling_for_simulation(costs), asks, faults=faults
    )
    (record,) = audited(world).records
    assert (record.outcome, record.attempts, record.n_out) == ("finished", 2, 20)
    # Steps from 3.66 on: 6 of them by 10, so 7 tokens; the other 13 come from the other one.
    assert record.intervals.n == 19
    assert record.decode == "decode-1"
    # Lost at 10, told at 10.5; 2.07 s of prefill between four messages, one more to decode,
    # 12 steps, and the way back.
    assert record.ended_s == pytest.approx(10.5 + 1.5 + 2.23 - 0.16 + 0.5 + 0.5 + 12 + 0.5, abs=1)


def test_a_lost_kvstore_is_done_without() -> None:
    costs = tiny_costs(local_bytes_per_s=100.0)  # reads take 40 s
    asks = [a_trace_request(at_s=0.0, shared=4), a_trace_request(at_s=100.0, prompt=1, shared=4)]
    faults = [WorkerFault(103.0, "kvstore-0")]
    world = ClusterSim(spec(), costs, scheduling_for_simulation(costs), asks, faults=faults)
    _, second = audited(world).records
    assert second.attempts == 2
    assert (second.outcome, second.n_cached) == ("finished", 0)


def test_who_shared_a_pass_with_a_read_from_a_lost_kvstore_is_answered() -> None:
    costs = tiny_costs(local_bytes_per_s=100.0)
    asks = [
        a_trace_request(shared=4),
        a_trace_request(100.0, 150, 1, prompt=1),  # is computed while the next two come
        a_trace_request(100.2, 80, 1, prompt=2, shared=4),  # reads for 40 s
        a_trace_request(100.3, 10, 1, prompt=3),  # has all but the end of that pass
    ]
    faults = [WorkerFault(110.0, "kvstore-0")]
    world = ClusterSim(spec(), costs, scheduling_for_simulation(costs), asks, faults=faults)
    *_, reader, other = audited(world).records
    assert (reader.outcome, reader.attempts) == ("finished", 2)
    assert (other.outcome, other.attempts) == ("finished", 1)
    assert other.first_token_s is not None and reader.first_token_s is not None
    assert 110.0 < other.first_token_s < reader.first_token_s


def test_a_fault_of_a_stranger_is_refused() -> None:
    costs = tiny_costs()
    with pytest.raises(BadScenario, match="decode-7"):
        ClusterSim(
            spec(),
            costs,
            scheduling_for_simulation(costs),
            [a_trace_request()],
            faults=[WorkerFault(1.0, "decode-7")],
        )


# -- the same again ------------------------------------------------------------------------------


def record_run(seed: int, watcher: Callable[..., None] | None = None) -> ClusterSim:
    costs = tiny_costs(network_bytes_per_s=3000.0)
    config = scheduling_for_simulation(costs, placement="random", seed=seed)
    faults = [WorkerFault(12.0, "decode-0", 5.0), WorkerFault(20.0, "prefill-1", 3.0)]
    shape = spec(n_prefill=2, n_decode=2, **SMALL)
    return ClusterSim(shape, costs, config, some_asks(seed), faults=faults, watcher=watcher)


def test_the_same_seed_gives_the_same_bytes() -> None:
    texts = {results_to_json([("run", record_run(5).run())], with_requests=True) for _ in range(3)}
    assert len(texts) == 1
    other = results_to_json([("run", record_run(6).run())], with_requests=True)
    assert other not in texts


def test_what_the_conductor_was_told_replays_to_the_same_commands() -> None:
    journal: list[tuple[float, AnyEvent, list[AnyCommand]]] = []
    world = record_run(5, lambda now, event, commands: journal.append((now, event, commands)))
    world.run()
    again = Conductor(
        SchedulingConfig(**{f: getattr(world.config, f) for f in world.config.__struct_fields__})
    )
    assert len(journal) > 100
    for now, event, commands in journal:
        assert again.handle(event, now) == commands
