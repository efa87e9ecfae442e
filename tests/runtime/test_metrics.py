"""MetricSnapshot as a scrape shows them."""

import random

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from halfmoon_runtime.observability.histogram import FastHistogram
from halfmoon_runtime.observability.metrics import (
    LabelledValues,
    MetricSnapshot,
    by_label,
    expose_metrics,
)

BOUNDS = (0.1, 1.0, 10.0)


def shown(registry: CollectorRegistry) -> list[str]:
    return generate_latest(registry).decode().splitlines()


def test_a_distribution_shows_what_the_librarys_histogram_shows() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    light = FastHistogram(BOUNDS)
    expose_metrics(lambda: {"tbt_seconds": ("Between two tokens.", light)}, registry=ours)
    heavy = prometheus_client.Histogram(
        "tbt_seconds", "Between two tokens.", buckets=BOUNDS, registry=theirs
    )
    dice = random.Random(4)
    for value in (*BOUNDS, 0.0, *(dice.lognormvariate(0, 2) for _ in range(200))):
        light.observe(value)
        heavy.observe(value)
    assert light.n == 204
    assert shown(ours) == [line for line in shown(theirs) if "_created" not in line]


def test_a_name_says_whether_it_is_a_counter_or_a_gauge() -> None:
    registry = CollectorRegistry()
    readings: MetricSnapshot = {"reads_total": ("Reads.", 3), "pages": ("Pages.", 4)}
    expose_metrics(lambda: readings, registry=registry)
    assert shown(registry) == [
        "# HELP reads_total Reads.", "# TYPE reads_total counter", "reads_total 3.0",
        "# HELP pages Pages.", "# TYPE pages gauge", "pages 4.0",
    ]  # fmt: skip


def test_values_of_labels_come_and_go_with_what_is_read() -> None:
    registry = CollectorRegistry()
    behind = {"kvstore-0": 2.0, "kvstore-1": 0.0}
    waits = {("memory", "hit"): FastHistogram((1.0,))}
    expose_metrics(
        lambda: {
            "events_behind": ("Behind.", by_label("kvstore", behind)),
            "wait_seconds": ("Waits.", LabelledValues(("tier", "result"), waits)),
        },
        registry=registry,
    )
    assert 'events_behind{kvstore="kvstore-0"} 2.0' in shown(registry)
    assert 'wait_seconds_count{result="hit",tier="memory"} 0.0' in shown(registry)
    del behind["kvstore-0"]
    assert 'events_behind{kvstore="kvstore-0"} 2.0' not in shown(registry)
    assert 'events_behind{kvstore="kvstore-1"} 0.0' in shown(registry)


def test_a_second_metric_of_a_name_is_refused_and_what_is_shown_no_more_makes_room() -> None:
    registry = CollectorRegistry()
    hide = expose_metrics(lambda: {"pages": ("Pages.", 4)}, registry=registry)
    with pytest.raises(ValueError, match="pages"):
        expose_metrics(lambda: {"pages": ("Others.", 5)}, registry=registry)
    hide()
    expose_metrics(lambda: {"pages": ("Others.", 5)}, registry=registry)
    assert "pages 5.0" in shown(registry)
