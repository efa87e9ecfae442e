"""On a machine with Python, make and a shell alone, a test is skipped and does not fail."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.installed_programs import PACKAGES

TESTS = Path(__file__).resolve().parents[1]
#: Folders whose tests run in an environment of their own.
ELSEWHERE = ("compose", "native", "vllm")
#: Programs that `make test` itself needs.
ALWAYS_THERE = {"make", "sh"}
GUARDS = {"needs_programs", "skip_without"}
#: Helpers of ours that start a program, by the names of their classes.
SERVERS = {"EtcdServer": "etcd"}
FILES = [
    path
    for path in sorted(TESTS.rglob("*.py"))
    if path.relative_to(TESTS).parts[0] not in ELSEWHERE and "node_modules" not in path.parts
]


def name_of(function: ast.expr) -> str:
    """Return the last part of what is called."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def is_of_subprocess(function: ast.expr) -> bool:
    value = getattr(function, "value", None)
    return isinstance(value, ast.Name) and value.id == "subprocess"


def strings(nodes: list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def started(tree: ast.Module) -> set[str]:
    """Return the programs that a file starts, as far as they stand there by name."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and is_of_subprocess(node.func):
            first = node.args[0] if node.args else None
            found.update(strings(first.elts[:1] if isinstance(first, ast.List) else []))
        if isinstance(node, ast.Call) and name_of(node.func) == "create_subprocess_exec":
            found.update(strings(node.args[:1]))
        # A list that begins with a program, wherever it is run.
        if isinstance(node, ast.List) and PACKAGES.keys() & set(strings(node.elts[:1])):
            found.update(strings(node.elts[:1]))
        if isinstance(node, ast.Call) and name_of(node.func) in SERVERS:
            found.add(SERVERS[name_of(node.func)])
    return found


def guarded(tree: ast.Module) -> set[str]:
    """Return the programs without which tests of a file are skipped."""
    return {
        program
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and name_of(node.func) in GUARDS
        for program in strings(node.args)
    }


def test_a_program_that_a_machine_may_lack_is_looked_for_before_it_is_started() -> None:
    unguarded: dict[str, list[str]] = {}
    for path in FILES:
        tree = ast.parse(path.read_text())
        if programs := started(tree) - ALWAYS_THERE - guarded(tree):
            unguarded[str(path.relative_to(TESTS))] = sorted(programs)
    assert not unguarded, "see tests/installed_programs.py"
