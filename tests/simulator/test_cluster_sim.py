"""The simulated cluster, worked out by hand, and with faults; audited as it runs."""

from typing import Any

import pytest

from halfmoon_protocol.messages import DecodeCost
from halfmoon_scheduling.commands import AnyCommand
from halfmoon_scheduling.events import AnyEvent
from halfmoon_simulator.cluster.cluster_sim import BadScenario, WorkerFault
from halfmoon_simulator.results.run_results import SimRequestRecord
from halfmoon_testing.simulator_inputs import a_trace_request, tiny_costs
from tests.simulator.worlds import a_world, audited


def records(*asks: Any, **more: Any) -> list[SimRequestRecord]:
    return audited(a_world(*asks, **more)).records


def test_one_request_by_hand() -> None:
    """Half a second per message, 2 s of prefill, two steps of 1 s."""
    (record,) = records(a_trace_request(at_s=10.0, n_input=100, n_output=3))
    # Reserve and answer: 11; start prefill 11.5, computed 13.5, told 14.
    assert record.first_token_s == 14.0
    # Start decode 14.5, steps end at 15.5 and 16.5, tokens are there half a second later.
    assert record.ended_s == 17.0
    assert record.intervals.runs == ((1, 2.0), (1, 1.0))
    assert (record.outcome, record.n_out, record.attempts) == ("finished", 3, 1)


def test_prompts_queue_for_the_worker_and_share_a_pass() -> None:
    # One after the other: the second is computed from 3.5 to 5.5. In large chunks the first one
    # is alone in its pass as well, which began before the second one came.
    for chunk_tokens in (100, 200):
        asks = [a_trace_request(prompt=i) for i in range(2)]
        assert [r.ttft_s for r in records(*asks, chunk_tokens=chunk_tokens)] == [4.0, 6.0]


@pytest.mark.parametrize(
    ("more", "n_passes"),
    [({}, 3), ({"max_chunk_s": 3.0}, 1), ({"max_chunk_s": 3.0, "max_chunk_tokens": 64}, 2)],
)
def test_a_long_prompt_takes_a_pass_per_chunk_and_fewer_if_they_may_be_long(
    more: dict[str, Any], n_passes: int
) -> None:
    (record,) = records(a_trace_request(n_input=100), chunk_tokens=40, **more)
    assert record.ttft_s == pytest.approx(3.0 + n_passes)


def test_a_prompt_that_is_due_soon_is_computed_before_one_with_time_left() -> None:
    asks = [
        a_trace_request(n_input=120, prompt=0),
        a_trace_request(at_s=1.0, n_input=40, prompt=1, ttft_slo_s=50.0),
        a_trace_request(at_s=1.0, n_input=40, prompt=2, ttft_slo_s=7.0),
    ]
    by_arrival = records(*asks, chunk_tokens=40)
    assert [one.meets(None, None) for one in by_arrival] == [True, True, False]
    by_slack = records(*asks, chunk_tokens=40, queue_order="slack")
    assert [one.meets(None, None) for one in by_slack] == [True, True, True]


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


def test_decode_steps_grow_with_the_context() -> None:
    costs = tiny_costs(decode=DecodeCost(1.0, 0.5, 0.01))
    (record,) = records(a_trace_request(n_input=100, n_output=4), costs=costs)
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
    first, second = records(long, short)
    # The first steps from 3.16 + 0.5 on, once a second; the second may start at 7.86.
    assert first.first_token_s == pytest.approx(3.16)
    assert second.first_token_s == pytest.approx(7.36)
    assert second.ended_s == pytest.approx(8.66 + 1.0 + 0.5)
    assert first.ended_s == pytest.approx(3.66 + 29.0 + 0.5)


def test_the_next_turn_waits_for_the_one_before() -> None:
    first, second = records(
        a_trace_request(at_s=1.0, session="s"), a_trace_request(at_s=5.0, prompt=1, session="s")
    )
    assert first.ended_s is not None
    assert second.arrived_s == first.ended_s + 5.0


def test_the_conductor_never_learns_how_long_an_answer_is() -> None:
    told: list[int] = []

    def watch(_: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
        request = getattr(event, "request", None)
        if request is not None:
            told.append(request.stopping.max_new_tokens)

    asks = [a_trace_request(n_output=n, prompt=n) for n in (1, 5, 9)]
    a_world(*asks, watcher=watch, max_new_tokens=50).run()
    assert told == [50, 50, 50]


# -- faults ---------------------------------------------------------------------------------------


def test_a_lost_decode_worker_costs_a_try_and_no_token() -> None:
    ask, fault = a_trace_request(n_input=16, n_output=20), WorkerFault(10.0, "decode-0")
    (record,) = records(ask, faults=[fault], n_decode=2)
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
    _, second = records(*asks, costs=costs, faults=[WorkerFault(103.0, "kvstore-0")])
    assert second.attempts == 2
    assert (second.outcome, second.n_cached) == ("finished", 0)


def test_a_fault_of_a_stranger_is_refused() -> None:
    with pytest.raises(BadScenario, match="decode-7"):
        a_world(a_trace_request(), faults=[WorkerFault(1.0, "decode-7")])
