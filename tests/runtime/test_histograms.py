"""Histograms for what is observed very often: the same on a scrape as the library's own."""

import random

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from halfmoon_runtime.histograms import Histogram

BOUNDS = (0.1, 1.0, 10.0)


def test_it_shows_what_the_librarys_histogram_shows() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    light = Histogram("tbt_seconds", "Between two tokens.", BOUNDS, ours)
    heavy = prometheus_client.Histogram(
        "tbt_seconds", "Between two tokens.", buckets=BOUNDS, registry=theirs
    )
    dice = random.Random(4)
    for value in (*BOUNDS, 0.0, *(dice.lognormvariate(0, 2) for _ in range(200))):
        light.observe(value)
        heavy.observe(value)
    expected = [
        line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line
    ]
    assert generate_latest(ours).decode().splitlines() == expected


def test_every_value_of_a_label_is_there_before_anything_is_observed() -> None:
    registry = CollectorRegistry()
    stages = Histogram(
        "stage_seconds", "A stage.", BOUNDS, registry, label="stage", values=("queue", "fetch")
    )
    stages.observe(0.5, "fetch")
    assert registry.get_sample_value("stage_seconds_count", {"stage": "queue"}) == 0
    assert registry.get_sample_value("stage_seconds_count", {"stage": "fetch"}) == 1
    assert registry.get_sample_value("stage_seconds_sum", {"stage": "fetch"}) == 0.5


def test_a_second_metric_of_the_name_is_refused() -> None:
    registry = CollectorRegistry()
    Histogram("tbt_seconds", "Between two tokens.", BOUNDS, registry)
    with pytest.raises(ValueError, match="tbt_seconds"):
        Histogram("tbt_seconds", "Between two tokens.", BOUNDS, registry)
