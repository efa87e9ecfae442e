"""What Grafana and Prometheus ask for, and what docs/metrics.md lists, is what services serve."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from halfmoon_conductor.observability.metrics.vllm_metric_names import VLLM_METRIC_NAMES
from halfmoon_conductor.tenants import add_tenant
from halfmoon_testing.processes.forked_starts import unforked

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
#: What Prometheus adds to every sample, some of it from the conductor's list of targets.
ADDED = {"instance", "job", "worker", "model"}
#: Of the metrics library's own, without ours.
PROCESS = re.compile(r"(process|python)_")
MODEL = "fake://tiny"
#: Labels that variables of the dashboard choose by. Targets need not say their model.
CHOSEN = {"model": "$model|", "job": "$role", "worker": "$worker", "tenant": "$tenant"}


@dataclass
class Family:
    """One metric, over all services that have it."""

    type: str
    text: str
    services: set[str] = field(default_factory=set)
    #: None until there is a sample.
    labels: set[str] | None = None
    values: set[str] = field(default_factory=set)


@dataclass
class Served:
    """What a cluster shows after a few requests."""

    families: dict[str, Family]
    #: Names as queries write them → their family's.
    names: dict[str, str]
    samples: dict[str, float]


def scrape(live: Any) -> Served:
    served = Served({}, {}, {})
    pages = [("conductor", f"{live.url}/metrics")]
    for name, process in live.cluster.processes.items():
        pages.append((name.split("-")[0], f"{process.status['operators']}/metrics"))
    for service, url in pages:
        text = httpx.get(url, timeout=30).text
        for family in text_string_to_metric_families(text):
            if not PROCESS.match(family.name):
                _add(served, service, family)
    return served


def _add(served: Served, service: str, family: Any) -> None:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    suffixes = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("",)
    known = served.families.setdefault(name, Family(family.type, family.documentation))
    assert (known.type, known.text) == (family.type, family.documentation), name
    known.services.add(service)
    served.names |= {name + suffix: name for suffix in suffixes}
    for sample in family.samples:
        if sample.name.endswith("_created"):
            continue
        labels = set(sample.labels) - {"le"}
        assert known.labels in (None, labels), (name, known.labels, labels)
        known.labels = labels
        known.values |= set(sample.labels.values())
        key = sample.name + str(sorted(sample.labels.items()))
        served.samples[key] = served.samples.get(key, 0.0) + sample.value


@pytest.fixture(scope="module")
def served(
    start_cluster: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    key, limited = add_tenant(tenants, "lab", operator=True), add_tenant(tenants, "shop")
    with tenants.open("a") as file:
        file.write("requests_per_minute = 1\n")
    flags = {"conductor": [f"--tenants={tenants}"], "kvstore": ["--tenant-quotas-mib=lab=8"]}
    # A forked service has the metrics of all services.
    with unforked(), start_cluster(MODEL, n_kvstore=1, key=key, extra=flags) as live:
        live.complete(prompt=list(range(300)), max_tokens=4)
        live.until(
            lambda: (
                live.complete(prompt=list(range(300)), max_tokens=4)["usage"][
                    "prompt_tokens_details"
                ]["cached_tokens"]
                > 0
            )
        )
        ask = {"model": live.model, "prompt": [1, 2], "max_tokens": 1}
        shop = {"authorization": f"Bearer {limited}"}
        answers = [
            httpx.post(f"{live.url}/v1/completions", json=ask, headers=shop, timeout=60)
            for _ in range(2)
        ]
        assert [answer.status_code for answer in answers] == [200, 429]
        yield scrape(live)


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    """The dashboard, as its script makes it and as its file has it."""
    script = spec_from_file_location("build", ROOT / "deploy/grafana/build.py")
    assert script is not None and script.loader is not None
    build = module_from_spec(script)
    script.loader.exec_module(build)
    assert build.TARGET.read_text() == build.written(), "run python deploy/grafana/build.py"
    found: dict[str, Any] = build.dashboard()
    return found


def graphs(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] == "timeseries"]


def shown(board: dict[str, Any]) -> list[str]:
    """All that the dashboard asks for."""
    found = [target["expr"] for panel in graphs(board) for target in panel["targets"]]
    assert len(found) > 50
    return [query.replace("$__rate_interval", "1m") for query in found]


def alerts() -> list[str]:
    groups = yaml.safe_load((ROOT / "deploy/prometheus-alerts.yml").read_text())["groups"]
    found = [rule["expr"] for group in groups for rule in group["rules"]]
    assert len(found) > 10
    return found


def selectors(node: Any) -> Iterator[Any]:
    """All vector selectors of a query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for part in ("vector_selector", "expr", "lhs", "rhs", "param"):
        if (inside := getattr(node, part, None)) is not None:
            yield from selectors(inside)
    for argument in getattr(node, "args", None) or ():
        yield from selectors(argument)


def kept_labels(node: Any) -> set[str]:
    """Labels that some aggregation or matching names."""
    modifier = getattr(node, "modifier", None)
    matching = getattr(modifier, "matching", None)
    labels = set(getattr(modifier, "labels", None) or ()) | set(
        getattr(matching, "labels", None) or ()
    )
    for part in ("expr", "lhs", "rhs"):
        if (inside := getattr(node, part, None)) is not None:
            labels |= kept_labels(inside)
    for argument in getattr(node, "args", None) or ():
        labels |= kept_labels(argument)
    return labels


def test_every_query_asks_for_metrics_and_labels_that_are_served(
    served: Served, board: dict[str, Any]
) -> None:
    for query in (*shown(board), *alerts()):
        node = promql_parser.parse(query)
        asked = list(selectors(node))
        assert asked, query
        labels_served = set(ADDED)
        for selector in asked:
            if selector.name == "up" or PROCESS.match(selector.name):
                continue
            assert selector.name in served.names, f"nobody has {selector.name}: {query}"
            family = served.families[served.names[selector.name]]
            histogram = {"le"} if family.type == "histogram" else set()
            labels_served |= (family.labels or set()) | histogram
            for matcher in selector.matchers.matchers:
                labels = (family.labels or set()) | histogram | ADDED
                assert matcher.name in labels, f"{selector.name} has no {matcher.name}: {query}"
                if str(matcher.op).endswith("Equal") and matcher.name not in ADDED | histogram:
                    assert matcher.value in family.values, f"no {matcher.value}: {query}"
            if family.labels is None:
                labels_served |= kept_labels(node)  # nothing is known of them
        assert kept_labels(node) <= labels_served, query


def test_variables_choose_the_series_that_can_be_told_apart_by_them(
    served: Served, board: dict[str, Any]
) -> None:
    """A conductor's own numbers are of all workers: one worker's name would leave nothing."""
    for query in shown(board):
        for selector in selectors(promql_parser.parse(query)):
            matched = {m.name: m.value for m in selector.matchers.matchers}
            assert {k: v for k, v in matched.items() if k in CHOSEN} == {
                label: CHOSEN[label] for label in labels_to_choose(served, selector.name)
            }, query


def labels_to_choose(served: Served, name: str) -> set[str]:
    if PROCESS.match(name):
        return {"model", "job", "worker"}
    family = served.families[served.names[name]]
    of_workers = {"job", "worker"} if family.services != {"conductor"} else set()
    return {"model", *of_workers} | ({"tenant"} & (family.labels or set()))


def test_each_variable_lists_what_prometheus_has(served: Served, board: dict[str, Any]) -> None:
    variables = {each["name"]: each for each in board["templating"]["list"]}
    named = {label: value.strip("$|") for label, value in CHOSEN.items()}
    assert list(variables) == list(named.values())
    for label, name in named.items():
        variable = variables[name]
        query = variable["query"]["query"]
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert asked is not None and asked[2] == label and variable["query"]["query"] == query
        (selector,) = selectors(promql_parser.parse(asked[1]))
        known = ADDED | (
            served.families[selector.name].labels or set() if label == "tenant" else set()
        )
        assert label in known
        assert selector.name == ("halfmoon_tenant_tokens_total" if label == "tenant" else "up")
        for matcher in selector.matchers.matchers:
            assert matcher.name in known
            # Grafana fills variables in from left to right.
            chosen_before = list(CHOSEN.values())[: list(CHOSEN).index(label)]
            assert matcher.value in ("", *chosen_before)
        # Without a choice, series that lack the label are shown too.
        assert (variable["includeAll"], variable["allValue"]) == (True, ".*")


def test_the_board_is_one_that_grafana_reads(board: dict[str, Any]) -> None:
    """Ids are unique, nothing overlaps, rows come in their order, and the data source is there."""
    panels = board["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells
    rows = [panel for panel in panels if panel["type"] == "row"]
    assert [row["title"][:4] for row in rows] == [f"{n} · " for n in range(1, len(rows) + 1)]
    assert panels[0]["type"] == "text" and panels[1]["type"] == "row"
    assert all(f"**{n}**" in panels[0]["options"]["content"] for n in range(1, len(rows) + 1))
    titles = [panel["title"] for panel in graphs(board)]
    assert len(set(titles)) == len(titles)
    provisioned = yaml.safe_load((ROOT / "deploy/grafana/datasources/prometheus.yml").read_text())
    uids = {source["uid"] for source in provisioned["datasources"]}
    for panel in graphs(board):
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        for each in (panel, *panel["targets"]):
            assert each["datasource"]["uid"] in uids
    provider = yaml.safe_load((ROOT / "deploy/grafana/dashboards/provider.yml").read_text())
    assert [each["type"] for each in provider["providers"]] == ["file"]


def test_names_units_and_texts_are_as_prometheus_wants_them(served: Served) -> None:
    for name, family in served.families.items():
        assert family.text.endswith("."), name
        if name.startswith("vllm:"):
            continue
        assert re.fullmatch(r"halfmoon_[a-z0-9_]+", name), name
        assert (family.type == "counter") == name.endswith("_total"), name
        assert not re.search(r"_(ms|millis|mib|percent|count|sum|bucket)(_|$)", name), name
        assert family.type in ("counter", "gauge", "histogram"), name
        if family.type == "histogram":
            assert re.search(r"_(seconds|tokens|requests|ratio)$", name), name
        assert not {"le", "quantile", "job", "instance"} & (family.labels or set()), name


def test_no_label_says_which_request_it_was(served: Served) -> None:
    """What would be a new time series with every request."""
    for name, family in served.families.items():
        for value in family.values:
            assert not re.search(r"cmpl-|req-[0-9a-f]{8}", value), (name, value)
        assert len(family.values) < 80, (name, sorted(family.values))


def listed() -> dict[str, tuple[str, set[str], set[str]]]:
    """docs/metrics.md: name → type, labels, services."""
    rows = re.findall(
        r"^\| `(halfmoon_\w+)` \| (\w+) \| (.*?) \| (.*?) \| .+ \|$",
        (ROOT / "docs/metrics.md").read_text(),
        re.MULTILINE,
    )
    return {
        name: (kind, set(re.findall(r"`(\w+)`", labels)), set(services.split(", ")))
        for name, kind, labels, services in rows
    }


def test_the_page_on_metrics_lists_what_there_is(served: Served) -> None:
    ours = {name: f for name, f in served.families.items() if name.startswith("halfmoon_")}
    # A bridge of plain servers is no part of this cluster: see tests/bridge/test_bridge_app.py.
    known = {name: row for name, row in listed().items() if row[2] != {"servers"}}
    assert set(known) == set(ours)
    for name, family in ours.items():
        kind, labels, services = known[name]
        assert kind == family.type, name
        assert services == family.services, (name, family.services)
        assert family.labels is None or labels == family.labels, (name, family.labels)


def test_the_page_on_metrics_lists_vllms_names(served: Served) -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    assert {name for name in served.families if name.startswith("vllm:")} == set(VLLM_METRIC_NAMES)
    rows = dict(re.findall(r"^\| `(vllm:\w+)` \| (.+) \|$", page, re.MULTILINE))
    assert set(rows) == set(VLLM_METRIC_NAMES)
    for name, sources in VLLM_METRIC_NAMES.items():
        for source in sources:
            assert f"`{source.metric}`" in rows[name], name
        assert {"model_name", "engine"} <= (served.families[name].labels or set())


def test_prometheus_reaches_what_the_conductor_of_compose_lists() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    workers, conductors = config["scrape_configs"]
    (discovery,) = workers["http_sd_configs"]
    asked = urlsplit(discovery["url"])
    for found in conductors["dns_sd_configs"]:
        assert (found["names"], found["port"] in (asked.port, 9100)) == ([asked.hostname], True)
    assert asked.path == "/debug/prometheus-targets"
    conductor = compose[asked.hostname]
    assert str(asked.port) in re.findall(r":(\d+)$", conductor["ports"][0])
    assert conductor["environment"]["HALFMOON_HTTP_PORT"] == asked.port
    # Workers name their addresses in this network; what uses the machine's own has none there.
    assert compose["prometheus"]["networks"] == ["control"]
    for name, service in compose.items():
        if "halfmoon" in service["image"] and "network_mode" not in service:
            assert "control" in service["networks"], name
    mounted = str(compose["prometheus"]["volumes"])
    for file in ("prometheus.yml", *config["rule_files"]):
        assert f"./deploy/{Path(file).name}:/etc/prometheus/{Path(file).name}" in mounted
