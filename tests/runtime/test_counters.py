"""Counters that only add."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from halfmoon_runtime.counters import Counter


def test_a_counter_shows_what_was_counted() -> None:
    registry = CollectorRegistry()
    buns = Counter("bakery_buns", "Buns baked.", registry)
    buns.inc()
    buns.inc(11)
    text = generate_latest(registry).decode()
    assert "# TYPE bakery_buns_total counter" in text
    assert "bakery_buns_total 12.0" in text.splitlines()


def test_a_second_counter_of_that_name_is_refused() -> None:
    registry = CollectorRegistry()
    Counter("bakery_buns", "Buns baked.", registry)
    with pytest.raises(ValueError, match="bakery_buns"):
        Counter("bakery_buns", "Buns eaten.", registry)
