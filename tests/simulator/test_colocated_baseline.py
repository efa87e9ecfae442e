"""Coupled instances: by hand, both ways of batching, and audited after every event."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_simulator.colocated.colocated_baseline import ColocatedSim, ColocatedSpec
from halfmoon_simulator.results.run_results import RunResult
from halfmoon_simulator.workloads.traces import TraceRequest
from halfmoon_testing.simulator_inputs import a_trace_request, tiny_costs
from tests.nightly import by_day
from tests.simulator.worlds import some_asks


def audited(*asks: TraceRequest, costs: Any = None, **spec: Any) -> tuple[RunResult, ColocatedSim]:
    shape = ColocatedSpec(**{"n_instances": 1, "block_tokens": 16, **spec})
    world = ColocatedSim(shape, costs or tiny_costs(), asks)
    while world.step():
        world.check()
    return world.run(), world


def test_one_request_by_hand() -> None:
    result, _ = audited(a_trace_request(n_input=100, n_output=3))
    (record,) = result.records
    # 1 s and 10 ms a token; no messages; two steps of a second.
    assert (record.ttft_s, record.ended_s) == (2.0, 4.0)
    assert record.intervals.runs == ((1, 1.0), (1, 1.0))


#: One that decodes, and a prompt that comes meanwhile.
MEETING = (
    a_trace_request(n_input=16, n_output=10),
    a_trace_request(4.5, n_input=100, n_output=2, prompt=1),
)


def test_a_prompt_that_comes_stalls_those_who_decode() -> None:
    first, second = audited(*MEETING)[0].records
    assert first.ttft_s == 1.16
    # Steps end at 2.16, 3.16, 4.16, 5.16; then 2 s of the other's prefill; both go on at 7.16.
    assert second.first_token_s is not None and round(second.first_token_s, 6) == 7.16
    assert sum(n for n, seconds in first.intervals.runs if round(seconds, 6) == 3.0) == 1
    assert first.intervals.n == 9
    assert round(second.intervals.mean_s, 6) == 1.0


def test_with_chunks_nobody_stands_still() -> None:
    first, second = audited(*MEETING, chunk_tokens=51)[0].records
    # A step takes one token of the budget; 100 tokens are two chunks of 50, half a second more.
    assert round(first.intervals.max_s, 6) == 1.5
    assert second.first_token_s is not None
    assert round(second.first_token_s, 6) == 5.16 + 2 * 1.5


def test_prefixes_are_kept_only_with_prefix_caching() -> None:
    asks = (a_trace_request(0.0, shared=4), a_trace_request(50.0, prompt=1, shared=4))
    with_cache, _ = audited(*asks, prefix_caching=True)
    assert [record.n_cached for record in with_cache.records] == [0, 64]
    without, _ = audited(*asks)
    assert [record.n_cached for record in without.records] == [0, 0]


def test_what_never_fits_is_refused() -> None:
    result, _ = audited(a_trace_request(n_input=100), n_pages=6)
    assert [record.outcome for record in result.records] == ["rejected"]


@settings(max_examples=by_day(20, at_night=100))
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([None, 20, 64]), st.integers(1, 2))
def test_every_request_ends_once_and_nothing_leaks(
    seed: int, caching: bool, chunk_tokens: int | None, n_instances: int
) -> None:
    shape = {"prefix_caching": caching, "chunk_tokens": chunk_tokens, "n_instances": n_instances}
    result, world = audited(*some_asks(seed, sessions=True), n_pages=14, **shape)
    assert [record.outcome for record in result.records] == ["finished"] * 12
    assert all(record.intervals.n == record.n_output - 1 for record in result.records)
    assert all(instance.pool.n_available == 14 for instance in world.instances)


def test_the_kv_router_prefers_the_instance_that_has_the_prefix_or_the_least_to_do() -> None:
    asks = [
        a_trace_request(n_input=96, n_output=2, shared=5),
        a_trace_request(at_s=0.5, n_input=32, n_output=2, prompt=1),
        a_trace_request(at_s=20.0, n_input=16, n_output=40, prompt=2),
        a_trace_request(at_s=21.5, n_input=96, n_output=2, prompt=3, shared=5),
        a_trace_request(at_s=21.6, n_input=64, n_output=2, prompt=4),
    ]
    for router, expected in (("kv", [0, 1, 0, 0, 1]), ("requests", [0, 1, 0, 1, 0])):
        result, _ = audited(*asks, n_instances=2, prefix_caching=True, router=router)
        assert [record.prefill for record in result.records] == [f"instance-{i}" for i in expected]


def test_an_unknown_router_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="router is 'best', it is one of: requests, kv"):
        ColocatedSpec(router="best")
