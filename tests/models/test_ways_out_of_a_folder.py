"""No file of a model's folder leads to code, other files, the network or other libraries."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from tests.models.ways_out import WAYS, Way

ROOT = Path(__file__).parents[2]
PLACES = Path(__file__).parent / "transformers_places.txt"
#: Calls that open a file by its name, run code, or ask the hub.
CALLS = frozenset({
    "cached_file", "cached_files", "hf_hub_download", "snapshot_download", "repo_exists",
    "model_info", "urlopen", "list_repo_files", "list_repo_tree", "list_repo_templates",
    "get_config_dict", "create_model", "exec_module", "get_class_from_dynamic_module",
    "get_cached_module_file", "get_class_in_module", "load_custom_generate", "get_kernel",
    "lazy_load_kernel", "load_and_register_attn_kernel", "import_module", "__import__",
    "find_adapter_config_file", "consolidate_backbone_kwargs_to_config", "auto_conversion",
    "torch.load", "pickle.load", "httpx.get", "httpx.stream",
})  # fmt: skip
#: Parts of transformers that load no model of a folder: they train, convert, export and serve.
_APART = (
    "cli", "pipelines", "exporters", "trainer", "testing_utils.py", "safetensors_conversion.py",
    "integrations/integration_utils.py",
)  # fmt: skip
#: Files of a kind of models that are imported to load one.
_OF_MODELS = ("modeling_", "configuration_", "tokenization_")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process opened and asked for while it loaded a folder for each way."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.watched_loading", tmp_path_factory.mktemp("ways")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_watch_sees_what_is_opened_outside(outcomes: dict[str, Any]) -> None:
    assert outcomes["watched"]["opened"] == ["evil.json"]


@pytest.mark.parametrize(("name", "way"), WAYS.items(), ids=WAYS)
def test_no_way_leads_out_of_a_folder(name: str, way: Way, outcomes: dict[str, Any]) -> None:
    outcome = outcomes[name]
    assert outcome["opened"] == []
    strange = [asked for asked in outcome["asked"] if asked.split()[-1] != way.looks_for]
    assert strange == []
    for loader, refused in (("worker", way.refused), ("conductor", way.refused_by_conductor)):
        said = outcome[loader]
        assert re.search(refused, said) if refused else said == "", said


def test_each_place_of_transformers_that_leads_to_code_files_or_the_hub_is_known() -> None:
    """A new release of transformers may have more of them: each is to be read, and listed."""
    listed = {line for line in PLACES.read_text().splitlines() if line and line[0] != "#"}
    found = set(_places(Path(str(distribution("transformers").locate_file("transformers")))))
    assert sorted(found - listed) == [], f"read these, and list them in {PLACES.name}"
    assert sorted(listed - found) == [], "these are no longer there"


def _places(package: Path) -> Iterator[str]:
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        of_a_model = name.startswith("models/") and not name.startswith("models/auto/")
        if name.startswith(_APART) or (of_a_model and not path.name.startswith(_OF_MODELS)):
            continue
        text = path.read_text(encoding="utf-8")
        if any(f"{call}(" in text for call in CALLS):
            yield from (f"{name} {call}" for call in _calls(ast.parse(text)))


def _calls(tree: ast.AST) -> Iterator[str]:
    """Yield the calls of interest, each after the function that makes it."""
    waiting = [(tree, "")]
    while waiting:
        node, function = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}" if function else node.name
        elif isinstance(node, ast.Call) and (called := CALLS & _names(node.func)):
            yield f"{function} {min(called)}"
        waiting += [(child, function) for child in ast.iter_child_nodes(node)]


def _names(called: ast.expr) -> set[str]:
    if isinstance(called, ast.Name):
        return {called.id}
    if not isinstance(called, ast.Attribute):
        return set()
    of = called.value.id if isinstance(called.value, ast.Name) else ""
    return {called.attr, f"{of}.{called.attr}"}
