"""What packages say that they need, and what they import: the same, and no more.

The direction of imports is import-linter's matter (`pyproject.toml`); here is what it can't
see: whether a package installs alone, and what comes with it.
"""

import ast
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    path.parent.name: path.parent
    for path in sorted(
        [*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")]
    )
}
#: Parts of a framework that it tells its users to import, so that they need no line of their own.
COMES_WITH = {
    "starlette": {"fastapi"},
    "pydantic": {"fastapi", "pydantic-settings"},
    "pydantic_core": {"fastapi", "pydantic-settings"},
}
#: Imported where they are, and declared by no package: pyverbs belongs to the system, and of vllm a
#: machine has the build that fits its devices.
UNDECLARED = {"transfer": {"pyverbs"}, "engine-vllm": {"vllm"}, "vllm": {"vllm"}}
#: Loaded by name, by a library or when it is first needed: no import statement names it.
LOADED_BY_NAME = {
    "conductor": {"httptools"},
    "engine": {"jinja2", "safetensors"},
    "protocol": {"griffe-sphinx"},
    "transfer": {"cuda-bindings"},
}


def project(package: Path) -> dict[str, Any]:
    table = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert isinstance(table, dict)
    return table


def declared(package: Path) -> set[str]:
    """Canonical names of all requirements, optional ones included."""
    table = project(package)
    optional = [line for lines in table.get("optional-dependencies", {}).values() for line in lines]
    return {
        canonicalize_name(Requirement(line).name) for line in [*table["dependencies"], *optional]
    }


def imported(package: Path) -> set[str]:
    """Top-level names of all imports of others, wherever in a file they stand."""
    own = f"halfmoon_{package.name}".replace("-", "_")
    names: set[str] = set()
    for source in (package / own).rglob("*.py"):
        for node in _running(ast.parse(source.read_text(), str(source))):
            if isinstance(node, ast.Import):
                names.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {own}


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, without what only a type checker looks at."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=otherwise):
                for other in otherwise:
                    yield from _running(other)
            case _:
                yield from _running(node)


@cache
def distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


def distributions_of(module: str) -> set[str]:
    if module.startswith("halfmoon_"):
        return {canonicalize_name(module)}
    return {canonicalize_name(name) for name in distributions().get(module, [module])}


@pytest.mark.parametrize("name", PACKAGES)
def test_every_import_is_declared(name: str) -> None:
    package = PACKAGES[name]
    needs = declared(package)
    missing = {
        module
        for module in imported(package) - UNDECLARED.get(name, set())
        if not (distributions_of(module) | COMES_WITH.get(module, set())) & needs
    }
    assert not missing, f"{package}/pyproject.toml does not declare what provides {missing}"


@pytest.mark.parametrize("name", PACKAGES)
def test_everything_declared_is_imported(name: str) -> None:
    package = PACKAGES[name]
    used = {dist for module in imported(package) for dist in distributions_of(module)}
    unused = declared(package) - used - LOADED_BY_NAME.get(name, set())
    assert not unused, f"{package}/pyproject.toml declares {unused}, which nothing there imports"


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_is_named_after_its_folder(name: str) -> None:
    package = PACKAGES[name]
    assert project(package)["name"] == f"halfmoon-{name}"
    module = package / f"halfmoon_{name}".replace("-", "_")
    assert (module / "__init__.py").is_file()
    assert (module / "py.typed").is_file(), "its types would be ignored"


def requirements_of(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    for line in importlib.metadata.requires(name) or ():
        requirement = Requirement(line)
        environments = [{"extra": extra} for extra in (*extras, "")]
        if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
            yield requirement


def closure(name: str) -> set[str]:
    """All that an installation of this distribution brings, by canonical name."""
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(canonicalize_name(name), frozenset[str]())]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += [
                (canonicalize_name(needed.name), frozenset(needed.extras))
                for needed in requirements_of(*node)
            ]
    return {str(found) for found, _ in seen}


@pytest.mark.parametrize(
    ("name", "heavy"),
    [
        ("halfmoon-conductor", {"torch", "transformers"}),
        ("halfmoon-kvstore", {"torch", "transformers", "fastapi", "uvicorn"}),
        ("halfmoon-cli", {"torch", "transformers", "fastapi"}),
        ("halfmoon-engine", {"torch", "transformers"}),
    ],
)
def test_an_installation_brings_nothing_heavy(name: str, heavy: set[str]) -> None:
    found = closure(name)
    assert len(found) > 3, "nothing was followed"
    assert not found & heavy


@pytest.mark.parametrize("name", ["halfmoon-prefill", "halfmoon-decode"])
def test_who_runs_models_gets_torch(name: str) -> None:
    assert {"torch", "transformers"} <= closure(name)
