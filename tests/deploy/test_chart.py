"""The chart: what Kubernetes would be sent is valid, agrees with itself, and is closed."""

import base64
import json
import re
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml

from halfmoon_engine import demo
from halfmoon_protocol.messages import Stage
from halfmoon_runtime.settings import ServiceSettings
from halfmoon_workers.prefill.prefill_settings import PrefillSettings
from tests.deploy.conftest import ROLES

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
#: Settings that the chart gives itself, from its other values, or has no place for.
GIVEN = {
    *("worker_id", "host", "host_id", "advertise_host", "metadata", "metrics_port"),
    "allowed_hosts",
    *("cluster_key", "cluster_key_file", "allow_open_network", "metadata_port", "metadata_host"),
    *("http_port", "model", "served_model_name", "dtype", "block_size", "tenants", "drain_s"),
    *("disk_path", "disk_mib", "engine", "engine_options"),
    # The chart mounts no certificates, and its probes speak HTTP in the clear.
    *("tls_cert", "tls_key"),
}
Example = Callable[..., Any]
#: The oldest Kubernetes that Chart.yaml allows, and the newest whose schemas are there.
KUBERNETES = ("1.27", "1.37")


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    spec = workload["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def labels(workload: dict[str, Any]) -> dict[str, str]:
    found = workload["spec"]["template"]["metadata"]["labels"]
    assert isinstance(found, dict)
    return found


def selects(selector: dict[str, Any], workload: dict[str, Any]) -> bool:
    return selector.items() <= labels(workload).items()


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_valid_and_has_no_unknown_field(release: Any, version: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    assert len(release.objects) >= 15
    for each in release.objects:
        schemas.validate(each, version, strict=True)


def test_helm_finds_nothing_wrong(helm: Any, values_of: Callable[[str], Any]) -> None:
    report = helm.lint(str(ROOT / "deploy/helm/halfmoon"), values_of("trial"), strict=True)
    assert report["errors"] == []
    # 1: information, such as that there is no icon.
    assert [m for m in report["messages"] if m["severity"] > 1] == []


def test_without_a_metadata_server_nothing_is_installed(helm: Any, chart: Any) -> None:
    with pytest.raises(helm.HelmError, match=r"no metadata server: set metadata\.url"):
        chart.render({}, name="hm")


def test_every_setting_of_a_service_can_be_set() -> None:
    schema = json.loads((ROOT / "deploy/helm/halfmoon/values.schema.json").read_text())
    services: dict[str, type[ServiceSettings]] = {**ROLES, "": ServiceSettings}
    for role, settings in services.items():
        path = ["properties", role] * bool(role) + ["properties", "settings", "propertyNames"]
        listed = set(reduce(getitem, path, schema)["enum"])
        expected = settings.model_fields.keys() - GIVEN
        assert listed == expected, f"values.schema.json: {'/'.join(path)}: {listed ^ expected}"


def allowed_hosts(release: Any) -> list[str] | None:
    (container,) = pod(release.workloads["conductor"])["containers"]
    found = {one["name"]: one.get("value", "") for one in container["env"]}
    names = found.get("HALFMOON_ALLOWED_HOSTS")
    return None if names is None else names.split(",")


def test_a_conductor_without_tenants_answers_to_its_services(render: Callable[[Any], Any]) -> None:
    values: dict[str, Any] = {"metadata": {"url": "redis://redis:6379/0"}}
    own = allowed_hosts(render(values))
    assert own is not None
    services = render(values).of("Service")
    assert {"hm", "hm-conductor"} <= services.keys()
    namespace = own[1].removeprefix("hm.")
    for name in ("hm", "hm-conductor"):
        below = f"{name}.{namespace}"
        assert {name, below, f"{below}.svc", f"{below}.svc.cluster.local"} <= {*own}
    listed = values | {"conductor": {"allowedHosts": ["llm.example.com", "*.lab.example"]}}
    assert allowed_hosts(render(listed)) == [*own, "llm.example.com", "*.lab.example"]
    with_keys = {"tenants": {"secret": "keys"}}
    assert allowed_hosts(render(values | with_keys)) is None
    assert allowed_hosts(render(listed | with_keys)) == [*own, "llm.example.com", "*.lab.example"]


def key_variables(release: Any) -> list[dict[str, Any]]:
    """What each container is given of the cluster key, or of going without."""
    names = ("HALFMOON_CLUSTER_KEY", "HALFMOON_ALLOW_OPEN_NETWORK")
    found = []
    for workload in release.workloads.values():
        (container,) = pod(workload)["containers"]
        (variable,) = [one for one in container["env"] if one["name"] in names]
        found.append(variable)
    return found


def test_a_random_cluster_key_is_made_and_all_services_get_it(example: Example) -> None:
    keys = []
    for _ in range(2):
        release = example("defaults")
        (secret,) = release.of("Secret").values()
        ref = {"name": secret["metadata"]["name"], "key": "cluster-key"}
        for variable in key_variables(release):
            source = {"valueFrom": {"secretKeyRef": ref}}
            assert variable == {"name": "HALFMOON_CLUSTER_KEY", **source}
        keys.append(base64.b64decode(secret["data"]["cluster-key"]))
    assert all(re.fullmatch(rb"\w{64}", key) for key in keys) and keys[0] != keys[1]


def test_a_key_of_ones_own_or_none_takes_the_place_of_a_made_one(example: Example) -> None:
    own = example("defaults", clusterKey={"existingSecret": "ours", "key": "halfmoon"})
    for variable in key_variables(own):
        assert variable["valueFrom"] == {"secretKeyRef": {"name": "ours", "key": "halfmoon"}}
    without = example("defaults", clusterKey={"enabled": False})
    for variable in key_variables(without):
        assert variable == {"name": "HALFMOON_ALLOW_OPEN_NETWORK", "value": "true"}
    assert own.of("Secret") == without.of("Secret") == {}


def test_the_redis_of_a_trial_wants_a_random_password(example: Example) -> None:
    trials = [example("trial") for _ in range(2)]
    made = {each.of("Secret")["hm-redis"]["data"]["password"] for each in trials}
    assert len(made) == 2 and {len(base64.b64decode(each)) for each in made} == {64}
    of_secret = {"secretKeyRef": {"name": "hm-redis", "key": "password"}}
    (redis,) = pod(trials[0].of("Deployment")["hm-redis"])["containers"]
    assert redis["args"][-2:] == ["--requirepass", "$(REDISCLI_AUTH)"]
    assert redis["env"] == [{"name": "REDISCLI_AUTH", "valueFrom": of_secret}]
    for workload in trials[0].workloads.values():
        given = pod(workload)["containers"][0]["env"]
        names = [variable["name"] for variable in given]
        at = names.index("TRIAL_REDIS_PASSWORD")
        assert given[at]["valueFrom"] == of_secret
        # What refers to a variable stands behind it.
        assert at < names.index("HALFMOON_METADATA")


def test_a_misspelt_setting_is_refused(helm: Any, chart: Any) -> None:
    with pytest.raises(helm.HelmValuesError, match="chunk_token"):
        chart.validate_schema({"prefill": {"settings": {"chunk_token": 256}}})


def test_images_are_those_of_the_compose_file(chart: Any) -> None:
    built = {service["image"] for service in COMPOSE["services"].values()}
    assert {chart.values[role]["image"] for role in ROLES} <= built
    assert chart.values["trialRedis"]["image"] in built


def test_without_a_model_the_one_in_the_images_is_served(image: Callable[[str], str]) -> None:
    values = yaml.safe_load((ROOT / "deploy/helm/halfmoon/values.yaml").read_text())
    source = values["model"]["source"]
    assert COMPOSE["x-cluster"]["HALFMOON_MODEL"] == f"${{HALFMOON_MODEL:-{source}}}"
    for role in ("conductor", "prefill", "decode"):
        (copied,) = re.findall(rf"^COPY (\S+) {source}$", image(role), re.MULTILINE)
        assert ROOT / copied == demo.FOLDER


def test_everything_that_selects_pods_finds_those_of_one_role(release: Any) -> None:
    assert set(release.workloads) == set(ROLES)
    for role, workload in release.workloads.items():
        assert selects(workload["spec"]["selector"]["matchLabels"], workload)
        for kind in ("PodDisruptionBudget", "NetworkPolicy"):
            spec = release.of(kind)[f"hm-{role}"]["spec"]
            selector = (spec.get("selector") or spec["podSelector"])["matchLabels"]
            found = [r for r, w in release.workloads.items() if selects(selector, w)]
            assert found == [role], kind
        service = release.of("Service")[f"hm-{role}"]["spec"]
        assert service["clusterIP"] == "None"
        found = [r for r, w in release.workloads.items() if selects(service["selector"], w)]
        assert found == [role]
    api = release.of("Service")["hm"]["spec"]
    assert [r for r, w in release.workloads.items() if selects(api["selector"], w)] == ["conductor"]
    assert release.workloads["kvstore"]["spec"]["serviceName"] == "hm-kvstore"


def test_ports_are_named_where_they_are_opened(release: Any) -> None:
    for role, workload in release.workloads.items():
        (container,) = pod(workload)["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probes = [container[p] for p in ("startupProbe", "readinessProbe", "livenessProbe")]
        assert {probe["httpGet"]["port"] for probe in probes} <= set(ports)
        for service in release.of("Service").values():
            if selects(service["spec"]["selector"], workload):
                assert {p["targetPort"] for p in service["spec"]["ports"]} <= set(ports)
        policy = release.of("NetworkPolicy")[f"hm-{role}"]["spec"]
        opened = {p["port"] for rule in policy["ingress"] for p in rule["ports"]}
        assert {p for p in opened if isinstance(p, str)} == set(ports)


@pytest.mark.parametrize("layers_only", [False, True])
def test_a_group_has_a_pod_for_each_stage_beside_replicas(
    example: Example, layers_only: bool
) -> None:
    group = {"group": {"stages": 3, "layersOnly": layers_only}}
    release = example("defaults", prefill=group)
    alone = example("defaults")
    assert release.workloads.keys() - alone.workloads.keys() == {
        f"prefill-stage-{stage}" for stage in range(3)
    }
    settings = []
    for stage in range(3):
        workload = release.workloads[f"prefill-stage-{stage}"]
        assert workload["spec"]["replicas"] == 1
        assert selects(workload["spec"]["selector"]["matchLabels"], workload)
        # Only its own pods: those of the replicas lack the label.
        assert not selects(
            workload["spec"]["selector"]["matchLabels"], release.workloads["prefill"]
        )
        policy = release.of("NetworkPolicy")["hm-prefill"]["spec"]
        assert selects(policy["podSelector"]["matchLabels"], workload)
        (container,) = pod(workload)["containers"]
        given = {one["name"]: one.get("value") for one in container["env"]}
        assert len(given) == len(container["env"]), "a variable is given twice"
        names = ("group", "stage", "stage_layers_only")
        fields = {name: given[f"HALFMOON_{name.upper()}"] for name in names}
        settings.append(PrefillSettings(model="m", **fields))
    assert [each.stage_record for each in settings] == [
        Stage("group-0", stage, 3, chunk_tokens=1024) for stage in range(3)
    ]
    assert {each.stage_layers_only for each in settings} == {layers_only}
    (container,) = pod(release.workloads["prefill"])["containers"]
    assert not any("STAGE" in one["name"] for one in container["env"])


def test_a_group_that_can_not_be_is_refused_by_name(
    helm: Any, chart: Any, values_of: Callable[[str], Any]
) -> None:
    values = values_of("defaults")
    with pytest.raises(helm.HelmError, match=r"prefill\.group\.stages is 1: a group has 2"):
        chart.render({**values, "prefill": {"group": {"stages": 1}}}, name="hm")
    parts = {"group": {"stages": 2, "layersOnly": True}, "replicas": 0}
    with pytest.raises(helm.HelmError, match="short prompts need a worker with all layers"):
        chart.render({**values, "prefill": parts}, name="hm")


def test_a_drained_node_leaves_one_of_each(release: Any) -> None:
    for role, workload in release.workloads.items():
        scaling = release.of("HorizontalPodAutoscaler").get(f"hm-{role}")
        least = scaling["spec"]["minReplicas"] if scaling else workload["spec"]["replicas"]
        assert ("replicas" in workload["spec"]) == (scaling is None)
        budget = release.of("PodDisruptionBudget")[f"hm-{role}"]["spec"]["maxUnavailable"]
        # A trial has one of each, and a budget that would never let it go would hold its node.
        assert least == 1 or least - budget >= 1, role


def test_containers_are_nobody_and_write_only_where_they_are_told(example: Example) -> None:
    for name in ("defaults", "trial", "production", "gpu", "vllm"):
        release = example(name)
        for workload in [*release.workloads.values(), *release.of("Deployment").values()]:
            spec = pod(workload)
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["runAsUser"] > 0
            assert spec["automountServiceAccountToken"] is False
            assert spec["enableServiceLinks"] is False
            for container in [*spec["containers"], *spec.get("initContainers", [])]:
                context = container["securityContext"]
                assert context["readOnlyRootFilesystem"] is True
                assert context["allowPrivilegeEscalation"] is False
                assert context["capabilities"] == {"drop": ["ALL"]}
                assert "memory" in container["resources"]["limits"]


def test_rdma_workers_may_lock_memory_and_see_the_fabric(example: Example) -> None:
    release = example("rdma")
    for role in ("prefill", "decode", "kvstore"):
        spec = pod(release.workloads[role])
        (container,) = spec["containers"]
        assert spec["hostNetwork"] is True
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert container["resources"]["limits"]["rdma/hca"] == 1
    ports = {
        pod(w)["containers"][0]["ports"][-1]["containerPort"] for w in release.workloads.values()
    }
    # The conductor is on a network of its own, and may have the number of another.
    assert len(ports) == 3


def test_workers_with_vllm_have_its_image_and_shared_memory_for_its_ranks(example: Example) -> None:
    built = {service["image"] for service in COMPOSE["services"].values()}
    release = example("vllm")
    for role, workload in release.workloads.items():
        (container,) = pod(workload)["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        image = container["image"].rpartition("/")[2].partition(":")[0]
        assert image in built
        assert image.endswith("-vllm") == (role in ("prefill", "decode"))
        assert ("/dev/shm" in mounts) == (role in ("prefill", "decode"))
        volumes = {each["name"]: each for each in pod(workload)["volumes"]}
        assert set(mounts.values()) <= volumes.keys() | {"blocks"}


def reached(release: Any) -> set[tuple[str, str]]:
    """Who may dial whose free ports: both ends' policies let it through."""
    policies = {role: release.of("NetworkPolicy")[f"hm-{role}"]["spec"] for role in ROLES}

    def named(rules: list[dict[str, Any]], side: str) -> set[str]:
        free = [r for r in rules if any("endPort" in port for port in r["ports"])]
        return {
            role
            for rule in free
            for peer in rule[side]
            for role, workload in release.workloads.items()
            if selects(peer["podSelector"]["matchLabels"], workload)
        }

    into = {(c, role) for role, p in policies.items() for c in named(p["ingress"], "from")}
    out = {(role, c) for role, p in policies.items() for c in named(p["egress"], "to")}
    assert into == out, "one end's policy closes what the other's opens"
    return into


def test_policies_open_the_ways_that_the_protocol_names_and_no_others(release: Any) -> None:
    told = (ROOT / "docs/protocol.md").read_text()
    assert (
        "Conductors connect. Prefill and decode workers connect to kvstores, and stage 0 of a "
        "group to the other stages."
    ) in re.sub(r"\s+", " ", told)
    assert reached(release) == {
        ("conductor", "prefill"),
        ("conductor", "decode"),
        ("conductor", "kvstore"),
        ("prefill", "prefill"),  # stages of a group
        ("prefill", "decode"),  # the landing
        ("prefill", "kvstore"),
        ("decode", "kvstore"),  # answers, and prefixes of prompts that decode computes
        ("kvstore", "kvstore"),  # replicas, and what a node that leaves hands on
    }
    for role in ROLES:
        policy = release.of("NetworkPolicy")[f"hm-{role}"]["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        named = {port["port"] for rule in policy["egress"] for port in rule["ports"]}
        # Names, the metadata server, workers; nothing else.
        assert named <= {53, 6379, 32768}, role


def test_a_hub_can_be_reached_where_the_model_comes_from_one(render: Callable[[Any], Any]) -> None:
    release = render({"model": {"source": "org/model"}, "metadata": {"url": "redis://r:6379/0"}})
    opened = {
        role
        for role in ROLES
        for rule in release.of("NetworkPolicy")[f"hm-{role}"]["spec"]["egress"]
        if {"protocol": "TCP", "port": 443} in rule["ports"]
    }
    assert opened == {"conductor", "prefill", "decode"}


def test_clients_and_prometheus_reach_what_they_ask(example: Example) -> None:
    release = example("production")
    policy = release.values["networkPolicy"]
    by_port = {
        rule["ports"][0]["port"]: rule["from"]
        for rule in release.of("NetworkPolicy")["hm-conductor"]["spec"]["ingress"]
    }
    # The conductor has metrics on both.
    assert by_port["http"] == policy["clients"] + policy["monitoring"]
    assert by_port["metrics"] == policy["monitoring"]
    # Where nobody is named, everybody may come.
    for rule in example("trial").of("NetworkPolicy")["hm-conductor"]["spec"]["ingress"]:
        assert "from" not in rule


def test_autoscaling_asks_for_metrics_that_the_adapter_hands_on(example: Example) -> None:
    adapter = yaml.safe_load((ROOT / "deploy/helm/values/prometheus-adapter.yaml").read_text())
    handed_on = {rule["seriesQuery"].partition("{")[0] for rule in adapter["rules"]["custom"]}
    scalers = example("production").of("HorizontalPodAutoscaler")
    asked = {
        metric["pods"]["metric"]["name"]
        for scaler in scalers.values()
        for metric in scaler["spec"]["metrics"]
        if metric["type"] == "Pods"
    }
    assert set(scalers) == {"hm-conductor", "hm-prefill", "hm-decode"}
    assert asked == handed_on
