"""The speed that enough requests stand lies between two runs, or is said to be a bound."""

import pytest

from halfmoon_simulator.papers.goodput import capacity


def test_a_speed_lies_between_the_last_run_with_enough_and_the_first_without() -> None:
    found = capacity({0.75: 1.0, 1.0: 0.95, 2.0: 0.45, 3.0: 0.1})
    assert (found.enough, found.too_fast) == (1.0, 2.0)
    assert found.speed == pytest.approx(1.1)
    assert str(found) == "1.10×"
    assert found.between == "1× and 2×"


@pytest.mark.parametrize(
    ("shares", "said", "between"),
    [({1.0: 1.0, 2.0: 0.97}, "≥ 2.00×", "2×"), ({1.0: 0.7, 2.0: 0.4}, "< 1.00×", "1×")],
)
def test_what_no_two_runs_enclose_is_said_to_be_a_bound(
    shares: dict[float, float], said: str, between: str
) -> None:
    assert str(capacity(shares)) == said
    assert capacity(shares).between == between
