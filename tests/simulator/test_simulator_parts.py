"""The simulator's small parts: event queue, intervals, the batch's leaps, costs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.sampling import Stopping
from halfmoon_scheduling.decode.decode_batch import DecodeBatch
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.costs.calibration import a800_profiles, residuals
from halfmoon_simulator.costs.cost_file import BadCosts, dump_costs, load_costs
from halfmoon_simulator.results.token_intervals import TokenIntervals
from halfmoon_testing.simulator_inputs import tiny_costs


def drain(event_queue: EventQueue) -> None:
    while event_queue.step():
        pass


# -- event queue -------------------------------------------------------------------------------


def test_calls_come_by_time_and_then_in_the_order_they_were_made_known() -> None:
    event_queue, seen = EventQueue(), list[str]()
    event_queue.at(2.0, seen.append, "late")
    event_queue.at(1.0, seen.append, "first")
    event_queue.at(1.0, seen.append, "second")
    event_queue.at(1.0, lambda: event_queue.after(0.0, seen.append, "at once, behind those"))
    event_queue.at(1.0, seen.append, "third")
    drain(event_queue)
    assert seen == ["first", "second", "third", "at once, behind those", "late"]


def test_what_is_overdue_comes_now() -> None:
    event_queue, seen = EventQueue(), list[float]()
    event_queue.at(5.0, lambda: event_queue.at(1.0, lambda: seen.append(event_queue.now)))
    drain(event_queue)
    assert seen == [5.0]


# -- intervals -----------------------------------------------------------------------------------

RUNS = st.lists(
    st.tuples(st.integers(1, 50), st.sampled_from([0.01, 0.02, 0.03, 0.5])), min_size=1, max_size=6
)


@given(RUNS)
def test_intervals_are_as_if_written_out(runs: list[tuple[int, float]]) -> None:
    intervals = TokenIntervals(tuple(runs))
    flat = sorted(seconds for n, seconds in runs for _ in range(n))
    longest = flat[-((len(flat) + 9) // 10) :]
    assert intervals.n == len(flat)
    assert intervals.mean_s == pytest.approx(sum(flat) / len(flat))
    assert intervals.longest_tenth_s() == pytest.approx(sum(longest) / len(longest))
    assert intervals.max_s == flat[-1]
    assert intervals.quantile_s(0.5) == flat[-(-len(flat) // 2) - 1]


def test_the_wait_for_the_first_step_is_part_of_the_first_interval() -> None:
    after = TokenIntervals.after_gap(1.0, [(3, 0.5), (2, 0.25)])
    assert after.runs == ((1, 1.5), (2, 0.5), (2, 0.25))
    assert TokenIntervals.after_gap(1.0, []).runs == ()


# -- leaps of the decode batch -------------------------------------------------------------------


def a_batch(n_pages: int) -> DecodeBatch:
    pages = PageAllocator(n_pages)
    return DecodeBatch(pages, block_size=16, max_running=8, max_context=200, landing_ttl_s=1.0)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(2, 40)), min_size=1, max_size=4),
    st.integers(1, 40),
)
def test_skipping_steps_does_what_the_steps_do(
    requests: list[tuple[int, int]], n_steps: int
) -> None:
    leaping, walking = a_batch(64), a_batch(64)
    for batch in (leaping, walking):
        for i, (n_tokens, n_new) in enumerate(requests):
            batch.reserve(RequestId(f"r{i}"), n_tokens, Stopping(max_new_tokens=n_new), 0.0)
            batch.start(RequestId(f"r{i}"), 0, 0.0)
    n = min(n_steps, leaping.quiet_steps)
    if n < 1:
        with pytest.raises(ValueError, match="0 are quiet"):
            leaping.skip(1)
        return
    leaping.skip(n)
    for _ in range(n):
        step = walking.next_step()
        assert all(not walking.on_token(row.request_id, 0) for row in step.rows)
    leaping.check()
    assert leaping.context_tokens == walking.context_tokens
    assert leaping.free_pages == walking.free_pages
    assert leaping.next_step() == walking.next_step()


# -- costs ---------------------------------------------------------------------------------------


def test_the_a800_profiles_are_what_the_fit_gives_within_ten_percent_of_what_was_read() -> None:
    for costs in a800_profiles():
        assert load_costs(costs.name) == costs
    for point, published, ours in residuals():
        assert abs(ours / published - 1) < 0.10, point


def test_a_prompt_costs_the_same_in_one_pass_and_by_the_formula() -> None:
    costs = load_costs("llama3-70b-a800x8")
    whole = costs.pass_s + costs.chunk_s(1024, 9000, first=True)
    assert whole == pytest.approx(costs.prefill_s(9000, 1024))
    chunks_s = costs.chunk_s(0, 4096, first=True) + costs.chunk_s(4096, 9000, first=False)
    assert 2 * costs.pass_s + chunks_s == pytest.approx(costs.prefill_s(9000) + costs.pass_s)


def test_a_cost_file_is_read_as_it_was_written_or_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    with pytest.raises(BadCosts, match="llama3-70b-a800x8"):
        load_costs(str(path))
    path.write_text(dump_costs(tiny_costs()))
    assert load_costs(str(path)) == tiny_costs()
    path.write_text(dump_costs(tiny_costs()).replace('"n_layers": 2', '"n_layers": "two"'))
    with pytest.raises(BadCosts, match=r"mine\.json.*n_layers"):
        load_costs(str(path))
    path.write_text(dump_costs(tiny_costs(network_bytes_per_s=0.0)))
    with pytest.raises(BadCosts, match=r"network_bytes_per_s is 0\.0"):
        load_costs(str(path))
