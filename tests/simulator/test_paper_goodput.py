"""What a system can serve is told by runs alone, and a sweep that does not enclose it says so."""

import pytest

from halfmoon_simulator.papers.goodput import ENOUGH, NEAR, capacity, gain, next_speed

BETWEEN = capacity({0.75: 1.0, 1.0: 0.95, 2.0: 0.45, 3.0: 0.1})
NEVER_TOO_FAST = capacity({1.0: 1.0, 2.0: 0.97})
NEVER_ENOUGH = capacity({1.0: 0.7, 2.0: 0.4})


def test_what_a_system_serves_lies_between_two_runs_or_the_sweep_says_that_it_does_not() -> None:
    assert (BETWEEN.enough, BETWEEN.too_fast) == (1.0, 2.0)
    assert BETWEEN.enough_run({1.0: 0.95}) == "1× (95%)"
    assert BETWEEN.too_fast_run({2.0: 0.45}) == "2× (45%)"
    assert NEVER_TOO_FAST.too_fast_run({}) == "not reached: the sweep ends"
    assert NEVER_ENOUGH.enough_run({}) == "none of the runs"
    # A run out of line ends what counts as enough.
    found = capacity({1.0: 0.95, 2.0: 0.8, 3.0: 0.95})
    assert (found.enough, found.too_fast) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (capacity({4.0: 1.0, 5.0: 0.1}), BETWEEN, "+100% to +400%"),
        (NEVER_TOO_FAST, BETWEEN, "at least +0%"),
        (capacity({4.0: 1.0, 5.0: 0.1}), NEVER_ENOUGH, "at least +300%"),
        (NEVER_ENOUGH, BETWEEN, "at most +0%"),
        (NEVER_ENOUGH, NEVER_TOO_FAST, "at most -50%"),
        (NEVER_TOO_FAST, NEVER_TOO_FAST, "unknown"),
    ],
)
def test_a_gain_is_no_more_exact_than_the_runs(ours: object, theirs: object, said: str) -> None:
    assert gain(ours, theirs) == said  # type: ignore[arg-type]


@pytest.mark.parametrize("true_speed", [0.05, 0.3, 0.9, 1.2, 2.7, 4.2, 7.9, 9.0])
def test_speeds_are_run_until_two_near_ones_enclose_or_the_sweep_ends(true_speed: float) -> None:
    def share(speed: float) -> float:
        return 1.0 if speed <= true_speed else 0.0

    shares = {speed: share(speed) for speed in (1.0, 1.5, 2.0)}
    while (speed := next_speed(shares)) is not None:
        assert speed not in shares
        shares[speed] = share(speed)
    found = capacity(shares)
    assert (found.enough is None) == (true_speed < 0.1)
    assert (found.too_fast is None) == (true_speed > 8)
    if found.enough and found.too_fast:
        assert found.enough <= true_speed < found.too_fast <= NEAR * found.enough
    assert ENOUGH == 0.9
