"""Python programs of tutorials and the tour import only what their reader has by then.

`make up` installs `locks/cluster.txt` and our own packages. A page installs anything else itself,
before the program that imports it.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs/tutorials").glob("*.md")), ROOT / "docs/tour.md"]
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.M | re.S)
#: A program that is written to a file or read by Python, one of a `-c`, or a line that installs.
_STEP = re.compile(
    r"(?:^cat > \S+\.py|\bpython3? -)[^\n]*<<'(?P<end>\w+)'\n(?P<program>.*?)^(?P=end)$"
    r"|\bpython3? -c '(?P<line>[^']*)'"
    r"|\bpip install (?P<packages>[^\n&;|]*)",
    re.M | re.S,
)


def locked() -> set[str]:
    """Names of the distributions that `make up` installs from the lock."""
    return set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "locks/cluster.txt").read_text(), re.M))


def modules_of(program: str) -> set[str]:
    """Top-level modules that a program imports, without those of Python itself and our own."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return {name for name in found - sys.stdlib_module_names if not name.startswith("halfmoon_")}


@cache
def distributions_of_modules() -> Mapping[str, list[str]]:
    """Read once what half a second is needed for."""
    return packages_distributions()


def is_among(module: str, names: set[str]) -> bool:
    """Whether one of the distributions has a module."""
    distributions = distributions_of_modules().get(module, [module])
    return any(re.sub(r"[-_.]+", "-", each).lower() in names for each in distributions)


def missing_in(page: str) -> Iterator[str]:
    """Modules that programs of a page import and that nothing has installed before."""
    there = locked()
    for block in _BLOCK.findall(page):
        for step in _STEP.finditer(block):
            if step["packages"] is not None:
                words = step["packages"].split()
                there |= {re.split(r"[=<>\[]", word)[0] for word in words if word[0] != "-"}
                continue
            program = step["program"] if step["line"] is None else step["line"]
            yield from sorted(each for each in modules_of(program) if not is_among(each, there))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_programs_of_a_page_import_only_what_its_reader_has(page: Path) -> None:
    assert not [*missing_in(page.read_text())]


BLOCK = "```sh\n{}\n```\n"


@pytest.mark.parametrize(
    ("commands", "missing"),
    [
        ("cat > a.py <<'END'\nfrom openai import OpenAI\nEND\npython a.py", ["openai"]),
        (
            "python - > a <<'END'\nimport json, yaml, numpy.linalg, schemathesis\nEND",
            ["schemathesis"],
        ),
        (".venv/bin/python -c 'import no_such_module, halfmoon_engine'", ["no_such_module"]),
        (".venv/bin/pip install -q openai==3\npython -c 'import openai.types'", []),
        ("python -c 'import openai'\n.venv/bin/pip install openai", ["openai"]),
    ],
)
def test_what_is_imported_before_its_install_is_found(commands: str, missing: list[str]) -> None:
    assert [*missing_in(BLOCK.format(commands))] == missing


def test_programs_of_tutorials_are_found() -> None:
    """Were the pattern blind, the test above would say nothing."""
    text = "".join(page.read_text() for page in PAGES)
    assert {"ask.py", "compare.py"} <= set(re.findall(r"^cat > (\S+\.py) <<'", text, re.M))
    assert len([s for s in _STEP.finditer(text) if s["packages"] is None]) >= 4
