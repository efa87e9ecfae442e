from random import Random

from halfmoon_scheduling.prediction.sliding_quantile import WINDOW, SlidingQuantile


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
