from random import Random

import pytest

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import DecodeCost
from halfmoon_scheduling.prediction.cost_model import CostModel
from halfmoon_scheduling.prediction.mean_decode_step import MeanDecodeStep

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
