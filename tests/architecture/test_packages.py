"""Packages as they would be published: their metadata, their files, and their public names."""

import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(
    path.parent
    for pattern in ("libs/*/pyproject.toml", "services/*/pyproject.toml")
    for path in ROOT.glob(pattern)
)
by_folder = pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
#: Python code of READMEs, which must run as it stands there.
EXAMPLES = [
    pytest.param(code, id=f"{folder.name}-{number}")
    for folder in PACKAGES
    if (folder / "README.md").is_file()
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    )
]


def project(folder: Path) -> Any:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


@by_folder
def test_a_package_says_who_made_it_under_which_license_and_where_it_is(folder: Path) -> None:
    about, model = project(folder), project(ROOT / "libs" / "protocol")
    for field in ("version", "license", "license-files", "authors", "urls", "requires-python"):
        assert about[field] == model[field], field
    assert set(model["classifiers"]) <= set(about["classifiers"])
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@by_folder
def test_a_package_has_a_readme_that_shows_how_to_use_it(folder: Path) -> None:
    assert project(folder)["readme"] == "README.md"
    text = (folder / "README.md").read_text()
    assert text.startswith(f"# {project(folder)['name']}\n")
    assert "## Example\n" in text or "## Run\n" in text


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_example_of_a_readme_runs(code: str, tmp_path: Path) -> None:
    for extension in re.findall(r"import (halfmoon_\w+_native)", code):
        pytest.importorskip(extension, reason="it needs a C++ compiler: make native")
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout


@pytest.mark.parametrize("name", ["metadata", "sandbox", "scheduling", "simulator", "transfer"])
def test_public_names_can_be_imported(name: str) -> None:
    package = importlib.import_module(f"halfmoon_{name}")
    assert package.__all__ == sorted(package.__all__)
    for each in package.__all__:
        assert hasattr(package, each), each
    with pytest.raises(AttributeError):
        package.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", ["halfmoon_scheduling", "halfmoon_simulator"])
def test_a_large_package_imports_a_public_name_when_it_is_used(name: str) -> None:
    code = f"import {name}, sys; print([m for m in sys.modules if m.startswith('{name}.')])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_the_wheel_of_the_engine_holds_the_demo_model_and_not_its_training(tmp_path: Path) -> None:
    pytest.importorskip("build")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path,
         ROOT / "libs" / "engine"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    model = "halfmoon_engine/demo/model"
    assert {f"{model}/model.safetensors", f"{model}/tokenizer.json", f"{model}/README.md"} <= {
        *names
    }
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert [name for name in names if "/demo/" in name and name.endswith(".py")] == [
        "halfmoon_engine/demo/__init__.py"
    ]
    assert all(name.startswith(("halfmoon_engine/", "halfmoon_engine-")) for name in names)
