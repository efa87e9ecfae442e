"""What decode is predicted to do: who comes and goes, the mean step, and what was seen lately."""

from random import Random

import pytest

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import DecodeCost
from halfmoon_scheduling.prediction.cost_model import CostModel
from halfmoon_scheduling.prediction.decode_forecast import (
    DecodeStarts,
    LoadChange,
    uniform_load_change,
)
from halfmoon_scheduling.prediction.mean_decode_step import MeanDecodeStep
from halfmoon_scheduling.prediction.sliding_quantile import WINDOW, SlidingQuantile


def starts(*entries: tuple[float, int]) -> DecodeStarts:
    made = DecodeStarts()
    for i, (start_s, n_tokens) in enumerate(entries):
        made.add(RequestId(f"r{i}"), start_s, n_tokens)
    return made


def test_thousands_come_and_go_in_any_order_and_the_counts_stay_true() -> None:
    seed = 5
    print(f"seed {seed}")
    dice, book = Random(seed), DecodeStarts()
    here: dict[RequestId, tuple[float, int]] = {}
    for i in range(4000):
        if i < 1500 or dice.random() < 0.4:
            request_id, entry = RequestId(f"r{i}"), (float(dice.randrange(50)), dice.randrange(99))
            here[request_id] = entry
            book.add(request_id, *entry)
        elif here:
            request_id = dice.choice(list(here))
            book.remove(request_id, here.pop(request_id)[0])
        if i % 100 == 0:
            book.check()
            at_s = float(dice.randrange(50))
            before = [n_tokens for start_s, n_tokens in here.values() if start_s <= at_s]
            assert book.until(at_s) == (len(before), sum(before))
            assert len(book) == len(here)
    for request_id, (start_s, _) in here.items():
        book.remove(request_id, start_s)
    book.check()
    assert book.until(1e9) == (0, 0)


Entries = tuple[tuple[float, int], ...]
#: What runs, what is planned to be prefilled, the moment asked for, and the change from 12 s to it,
#: where a decode takes 10 s.
CHANGES: dict[str, tuple[Entries, Entries, float, tuple[int, int]]] = {
    "what began long ago is gone": (((2.0, 100), (10.0, 200), (11.0, 400)), (), 20.0, (-2, -300)),
    "what is prefilled by then has come": (
        (),
        ((13.0, 1000), (20.0, 2000), (21.0, 4000)),
        20.0,
        (2, 3000),
    ),
    "a prefill that should be over ends now": ((), ((1.0, 1000),), 20.0, (1, 1000)),
    "far ahead some have come and gone": ((), ((13.0, 1000), (30.0, 2000)), 35.0, (1, 2000)),
}


@pytest.mark.parametrize(("running", "pending", "at_s", "change"), CHANGES.values(), ids=CHANGES)
def test_with_a_uniform_decode_time(
    running: Entries, pending: Entries, at_s: float, change: tuple[int, int]
) -> None:
    found = uniform_load_change(starts(*running), starts(*pending), 12.0, at_s, 10.0)
    assert found == LoadChange(*change)


def test_an_unknown_decode_time_lets_nobody_go() -> None:
    change = uniform_load_change(starts((0.0, 100)), starts(), 1e6, 2e6, float("inf"))
    assert change == LoadChange(0, 0)


# -- the mean step -------------------------------------------------------------------------------

A, B = WorkerId("a"), WorkerId("b")


def test_what_is_added_is_spread_evenly_and_more_than_is_there_can_not_go_away() -> None:
    mean = MeanDecodeStep(CostModel())
    mean.put(A, DecodeCost(d0_s=1.0, d1_s=0.1, d2_s=0.001), 4, 1000)  # 1 + 0.4 + 1
    mean.put(B, DecodeCost(d0_s=2.0, d1_s=0.2, d2_s=0.002), 0, 0)  # 2
    assert mean.mean_s(0, 0) == pytest.approx((2.4 + 2.0) / 2)
    # One request and 100 tokens for each.
    assert mean.mean_s(2, 200) == pytest.approx((2.4 + 0.2 + 2.0 + 0.4) / 2)
    mean.drop(B)
    assert mean.mean_s(1, 100) == pytest.approx(2.4 + 0.2)
    assert mean.mean_s(-4, -1000) == pytest.approx(1.0)
    assert mean.mean_s(-400, -100_000) == 1.0


def test_the_sums_stay_true_over_many_changes_and_follow_corrections() -> None:
    seed = 11
    print(f"seed {seed}")
    dice, costs = Random(seed), CostModel()
    mean = MeanDecodeStep(costs)
    cost = DecodeCost(d0_s=0.02, d1_s=0.001, d2_s=1e-7)
    running: dict[WorkerId, tuple[int, int]] = {}
    for _ in range(500):
        worker = WorkerId(f"w{dice.randrange(5)}")
        if worker in running and dice.random() < 0.1:
            mean.drop(worker)
            costs.forget(worker)
            del running[worker]
            continue
        running[worker] = (dice.randrange(50), dice.randrange(500_000))
        costs.observe_step(worker, cost, 10, 1000, dice.uniform(0.01, 0.1))
        mean.put(worker, cost, *running[worker])
        mean.check()
        steps = [costs.step_s(w, cost, n, tokens) for w, (n, tokens) in running.items()]
        assert mean.mean_s(0, 0) == pytest.approx(sum(steps) / len(steps))


def test_an_absurd_cost_of_one_worker_is_gone_with_its_next_report() -> None:
    mean = MeanDecodeStep(CostModel())
    right = DecodeCost(d0_s=1.0, d1_s=0.1, d2_s=0.001)
    for worker in (A, B):
        mean.put(worker, right, 4, 1000)
    mean.put(B, DecodeCost(d0_s=1e9, d1_s=1e9, d2_s=1e9), 4, 1000)
    mean.put(B, right, 4, 1000)
    mean.check()
    assert mean.mean_s(0, 0) == pytest.approx(2.4)


# -- what was seen lately ------------------------------------------------------------------------


def test_a_quantile_is_what_a_share_of_the_values_does_not_exceed() -> None:
    sample = SlidingQuantile()
    for n in [10, 20, 20, 40]:
        sample.observe(n)
    assert [sample.quantile(q) for q in (0.0, 0.25, 0.5, 0.99)] == [10, 20, 20, 40]
    assert SlidingQuantile().quantile(0.5) == 0


def test_the_mean_is_of_the_values_that_count() -> None:
    sample = SlidingQuantile()
    assert sample.mean == 0
    for n in [100] * WINDOW + [2, 4] * (WINDOW // 2):
        sample.observe(n)
    sample.check()
    assert sample.mean == 3


def test_only_the_latest_values_count() -> None:
    sample, dice = SlidingQuantile(), Random(7)
    for _ in range(WINDOW):
        sample.observe(dice.randrange(1, 50))
        sample.check()
    for _ in range(WINDOW):
        sample.observe(100)
        sample.check()
    assert len(sample) == WINDOW
    assert sample.quantile(0.0) == 100
