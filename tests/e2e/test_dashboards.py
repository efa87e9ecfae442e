"""Grafana's dashboard asks for metrics, and labels, that the services have."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.e2e
DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana/dashboards/halfmoon.json"
#: What asks for metrics in order to start and stop pods.
SCALERS = ("halfmoon/templates/autoscaling.yaml", "values/prometheus-adapter.yaml")
#: What Prometheus adds, and the bounds of histograms.
ADDED = {"instance", "le"}


def scraped(urls: list[str]) -> dict[str, set[str]]:
    """Names of all samples and of metrics without any yet, and their labels."""
    names: dict[str, set[str]] = {}
    for url in urls:
        for family in text_string_to_metric_families(httpx.get(url, timeout=10).text):
            suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}
            for suffix in suffixes.get(family.type, ("",)):
                names.setdefault(family.name + suffix, set())
            for sample in family.samples:
                names.setdefault(sample.name, set()).update(sample.labels)
    return names


def test_every_metric_of_the_dashboard_is_served(start_cluster: Callable[..., Any]) -> None:
    with start_cluster("fake://tiny", n_kvstore=1) as live:
        live.complete(prompt=list(range(300)), max_tokens=4)
        live.complete(prompt=list(range(300)), max_tokens=4)
        operators = [f"{p.status['operators']}/metrics" for p in live.cluster.processes.values()]
        served = scraped([f"{live.url}/metrics", *operators])
    for scaler in SCALERS:
        asked = re.findall(r"halfmoon_\w+", (DEPLOY / "helm" / scaler).read_text())
        assert asked
        assert set(asked) <= served.keys(), scaler
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(expressions) > 20
    for expression in expressions:
        metrics = re.findall(r"halfmoon_\w+", expression)
        assert metrics, expression
        for metric in metrics:
            assert metric in served, f"nobody has {metric}"
            for label in re.findall(r"by \(([^)]*)\)", expression):
                wanted = set(label.split(", ")) - ADDED
                # Without a sample nothing is known of labels.
                assert not served[metric] or wanted <= served[metric], (metric, wanted)
