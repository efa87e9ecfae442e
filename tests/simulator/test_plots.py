"""What the pictures are drawn from."""

import pytest

from halfmoon_simulator.results.plots import rates_over_time
from halfmoon_simulator.results.run_results import ClusterSample


def a_sample(at_s: float, *, computed: int, cached: int, rejected: int) -> ClusterSample:
    return ClusterSample(at_s, 0.0, 0.0, 0.0, 0.0, 0, 0, rejected, computed, cached)


def test_hit_rate_and_rejections_are_drawn_from_the_first_samples_on() -> None:
    samples = [a_sample(5.0 * i, computed=30 * i, cached=10 * i, rejected=i) for i in range(4)]
    points = rates_over_time(samples)
    assert [at_s for at_s, _, _ in points] == [5.0, 10.0, 15.0]
    assert all(share == pytest.approx(0.25) for _, share, _ in points)
    assert all(rate == pytest.approx(0.2) for _, _, rate in points)


def test_what_was_long_ago_counts_no_more() -> None:
    samples = [a_sample(5.0 * i, computed=30, cached=0, rejected=9) for i in range(30)]
    samples[0] = a_sample(0.0, computed=0, cached=0, rejected=0)
    assert rates_over_time(samples)[0] == (5.0, 0.0, 1.8)
    assert rates_over_time(samples)[-1] == (145.0, 0.0, 0.0)
