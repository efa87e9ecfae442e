"""Services started with the environment that the chart gives their pods, and probed as they are."""

import base64
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from halfmoon_sandbox.bound_process import start_bound
from tests.deploy.conftest import ROLES

READY_WITHIN_S = 240.0
METRICS_PORT = 9100


#: The container of each role, and where its ports are.
Started = dict[str, tuple[dict[str, Any], dict[str, str]]]


def environment(container: dict[str, Any], pod_name: str, pod_ip: str) -> dict[str, str]:
    """The variables of a container, those included that come from its pod or from Secrets."""
    fields = {"metadata.name": pod_name, "status.podIP": pod_ip}
    secrets = {"url": "redis://:secret@redis:6379/0", "cluster-key": "k" * 32, "token": "t"}
    secrets["password"] = "s3cr3t"
    found = {}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            found[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            found[variable["name"]] = secrets[source["secretKeyRef"]["key"]]
        else:
            assert isinstance(variable["value"], str), variable
            # As Kubernetes does, from variables that stand before.
            value = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], variable["value"])
            found[variable["name"]] = value
    assert len(found) == len(container["env"]), "a variable is given twice"
    return found


def of_the_image(instructions: str) -> dict[str, str]:
    """The variables that an image sets."""
    return dict(re.findall(r"(HALFMOON_[A-Z_]+)=(\S+)", instructions))


def container_of(release: Any, role: str) -> dict[str, Any]:
    (container,) = release.workloads[role]["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


@pytest.fixture(params=ROLES)
def role(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_settings_are_read_as_the_values_say(
    release: Any, role: str, image: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    container = container_of(release, role)
    given = environment(container, f"hm-{role}-0", "127.0.0.1")
    known = {f"HALFMOON_{name.upper()}" for name in ROLES[role].model_fields}
    assert {name for name in given if name.startswith("HALFMOON_")} <= known
    for name in [name for name in os.environ if name.startswith("HALFMOON_")]:
        monkeypatch.delenv(name)
    # The network of the example is none of this machine's.
    given.pop("HALFMOON_TRANSFER_HOST", None)
    for name, value in {**of_the_image(image(role)), **given}.items():
        monkeypatch.setenv(name, value)
    settings: Any = ROLES[role].from_args([])
    values, workload = release.values, release.workloads[role]
    spec = workload["spec"]["template"]["spec"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert settings.worker_id == f"hm-{role}-0"
    assert settings.metadata.startswith("redis://")
    assert settings.metrics_port == ports["metrics"]
    assert settings.drain_s < spec["terminationGracePeriodSeconds"]
    assert os.environ["HALFMOON_STATUS_FILE"].startswith("/tmp/")
    assert "/tmp" in mounts
    for name, value in {**values["settings"], **values[role]["settings"]}.items():
        if name != "transfer_host":
            assert getattr(settings, name) == value
    if role == "conductor":
        assert settings.http_port == ports["http"]
        assert bool(settings.tenants) == bool(values["tenants"]["secret"])
        if settings.tenants:
            assert mounts[str(Path(settings.tenants).parent)]["readOnly"] is True
    if role == "kvstore" and values["kvstore"]["disk"]["enabled"]:
        (claim,) = workload["spec"]["volumeClaimTemplates"]
        size_gib = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi"))
        assert 0.8 * size_gib * 1024 <= settings.disk_mib < size_gib * 1024
        assert str(Path(settings.disk_path).parent) in mounts
    if role in ("prefill", "decode"):
        assert settings.engine == values[role]["engine"]
    if role != "kvstore":
        assert settings.model == values["model"]["source"]
        if values["model"]["claim"]:
            assert mounts["/models"]["readOnly"] is True


def test_numbers_reach_a_service_as_they_were_written(render: Callable[[Any], Any]) -> None:
    values = {
        "metadata": {"url": "redis://redis:6379/0"},
        "conductor": {"settings": {"max_body_bytes": 33554432, "tbt_slo_s": 0.05}},
        "prefill": {
            "settings": {"measure": False, "log_format": "console"},
            "engine": "vllm",
            "engineOptions": {"tensor_parallel_size": 2, "enforce_eager": True},
        },
        "environment": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://otel:4318"},
    }
    release = render(values)
    conductor = environment(container_of(release, "conductor"), "c", "127.0.0.1")
    prefill = environment(container_of(release, "prefill"), "p", "127.0.0.1")
    assert conductor["HALFMOON_MAX_BODY_BYTES"] == "33554432"
    assert conductor["HALFMOON_TBT_SLO_S"] == "0.05"
    assert prefill["HALFMOON_MEASURE"] == "false"
    options = json.loads(prefill["HALFMOON_ENGINE_OPTIONS"])
    assert options == {"tensor_parallel_size": "2", "enforce_eager": "true"}
    # A role's own setting wins over that for all.
    assert prefill["HALFMOON_LOG_FORMAT"] == "console"
    assert conductor["HALFMOON_LOG_FORMAT"] == "json"
    assert conductor["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://otel:4318"


@pytest.fixture
def started(render: Callable[[Any], Any], metadata_url: str, tmp_path: Path) -> Iterator[Started]:
    """A process per role, with an address of its own: its container, and where its ports are."""
    release = render(
        {"model": {"source": "fake://tiny"}, "metadata": {"url": "redis://not-used:6379/0"}}
    )
    seed = random.randrange(2**16)
    print(f"addresses 127.77.{seed >> 8}.{seed & 255 | 8}…")
    with ExitStack() as stack:
        found = {}
        for i, role in enumerate(ROLES):
            container = container_of(release, role)
            address = f"127.77.{seed >> 8}.{(seed & 255 | 8) ^ i}"
            given = environment(container, f"hm-{role}-0", address)
            given |= {"HALFMOON_METADATA": metadata_url, "HALFMOON_DISK_MIB": "64"}
            # A pod has all its addresses to itself; a test has this one.
            given |= {"HALFMOON_HOST": address, "HALFMOON_CAPACITY_MIB": "64"}
            given |= {"HALFMOON_DISK_PATH": str(tmp_path / "blocks"), "HALFMOON_POOL_MIB": "64"}
            others = {k: v for k, v in os.environ.items() if not k.startswith("HALFMOON_")}
            log = stack.enter_context((tmp_path / f"{role}.log").open("wb"))
            command = [sys.executable, "-m", f"halfmoon_{role}"]
            process = start_bound(command, env={**others, **given}, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            found[role] = (container, {n: f"http://{address}:{p}" for n, p in ports.items()})
        yield found


def answers(url: str) -> int:
    try:
        return httpx.get(url, timeout=10).status_code
    except httpx.HTTPError:
        return 0


@pytest.mark.e2e
def test_pods_become_ready_by_their_probes_and_listen_where_policies_let_them(
    started: Started, metadata_url: str, example: Callable[..., Any], tmp_path: Path
) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    for role, (container, urls) in started.items():
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            ask = container[probe]["httpGet"]
            url = f"{urls[ask['port']]}{ask['path']}"
            while answers(url) != 200:
                log = (tmp_path / f"{role}.log").read_text()[-3000:]
                assert time.monotonic() < deadline, f"{role}'s {probe}: {url}\n{log}"
                time.sleep(0.05)
    ports = example("defaults").values["networkPolicy"]["workerPorts"]
    records = httpx.get(metadata_url, params={"prefix": "halfmoon/"}, timeout=10).json().values()
    text = " ".join(base64.b64decode(record).decode() for record in records)
    told = {int(port) for port in re.findall(r"127\.77\.\d+\.\d+:(\d+)", text)} - {METRICS_PORT}
    # Commands, events and KV of three workers.
    assert len(told) == 9, text
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert all(first <= port <= last for port in told)
    # What Linux comes with.
    assert (ports["first"], ports["last"]) == (32768, 60999)
    url = started["conductor"][1]["http"]
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
