"""The chart as Helm renders it, for each of the examples in deploy/helm/values and for defaults."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml

from halfmoon_conductor.settings import ConductorSettings
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_runtime.settings import ServiceSettings
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.prefill.prefill_settings import PrefillSettings

DOCKERFILE = Path(__file__).parents[2] / "services/Dockerfile"
HELM = Path(__file__).parents[2] / "deploy/helm"
CHART = HELM / "halfmoon"
MISSING = "needs pip install --no-deps --require-hashes -r tests/deploy/requirements.txt"
#: Values that one would use together; a name per line of `helm install -f … -f …`.
EXAMPLES = {
    "defaults": (), "trial": ("trial",), "production": ("production",),
    "gpu": ("production", "gpu"), "vllm": ("production", "gpu", "vllm"),
    "rdma": ("production", "gpu", "rdma"),
}  # fmt: skip
REDIS = {"metadata": {"url": "redis://redis.example:6379/0"}}
Values = dict[str, Any]
ROLES: dict[str, type[ServiceSettings]] = {
    "conductor": ConductorSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "kvstore": KvstoreSettings,
}


@dataclass(frozen=True)
class Release:
    """What Helm would send to a cluster."""

    values: Values
    objects: list[dict[str, Any]]

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        """Objects of a kind, by name."""
        return {o["metadata"]["name"]: o for o in self.objects if o["kind"] == kind}

    @cached_property
    def workloads(self) -> dict[str, dict[str, Any]]:
        """Deployments and StatefulSets of our services, by role."""
        found = {**self.of("Deployment"), **self.of("StatefulSet")}
        return {
            name.removeprefix("hm-"): each for name, each in found.items() if name != "hm-redis"
        }


def combined(under: Values, over: Values) -> Values:
    """As Helm combines two files of values."""
    both = dict(under)
    for key, value in over.items():
        inner = both.get(key)
        both[key] = (
            combined(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
        )
    return both


def stages() -> dict[str, tuple[str, str]]:
    """Base and instructions of each stage of the Dockerfile, by name; the last has none."""
    lines = DOCKERFILE.read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if line.strip() and not line.startswith("#"))
    _, *parts = re.split(r"^FROM ", text, flags=re.MULTILINE)
    found = {}
    for part in parts:
        head, _, instructions = part.partition("\n")
        base, _, name = head.partition(" AS ")
        found[name] = base, instructions
    return found


@pytest.fixture(scope="session")
def image() -> Callable[[str], str]:
    """The instructions that make a stage, those of the stages below it first."""
    known = stages()

    def instructions(stage: str) -> str:
        base, lines = known[stage]
        return (instructions(base) if base in known else "") + lines

    return instructions


@pytest.fixture(scope="session")
def helm() -> Any:
    """Helm's own library."""
    return pytest.importorskip("helm_python", reason=MISSING)


@pytest.fixture(scope="session")
def chart(helm: Any) -> Iterator[Any]:
    with helm.Chart.load(CHART) as chart:
        yield chart


@pytest.fixture(scope="session")
def values_of(helm: Any) -> Callable[[str], Values]:
    """The values of an example, read by Helm's own reader of YAML."""

    def read(example: str) -> Values:
        values: Values = {} if EXAMPLES[example] else REDIS
        for name in EXAMPLES[example]:
            text = (HELM / "values" / f"{name}.yaml").read_text()
            values = combined(values, helm.values_from_yaml(text))
        return values

    return read


@pytest.fixture(scope="session")
def render(chart: Any) -> Callable[[Values], Release]:
    """``helm install hm`` without a cluster."""

    def rendered(values: Values) -> Release:
        chart.validate_schema(values)
        files = chart.render(values, name="hm", namespace="llm")
        texts = [text for name, text in files.items() if not name.endswith(".txt")]
        objects = [each for text in texts for each in yaml.safe_load_all(text) if each]
        return Release(chart.merge_values(values), objects)

    return rendered


@pytest.fixture(scope="session")
def example(
    render: Callable[[Values], Release], values_of: Callable[[str], Values]
) -> Callable[..., Release]:
    """An example as it is rendered, with other values in the place of some."""
    return lambda name, **over: render({**values_of(name), **over})


@pytest.fixture(params=EXAMPLES)
def release(request: pytest.FixtureRequest, example: Callable[..., Release]) -> Release:
    return example(request.param)
