"""Find circles of imports, of modules and of the packages in one distribution.

Imports inside functions and under `TYPE_CHECKING` count: a file that can only be read together
with another one is half a file.
"""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tools.checks.sources import modules


def faults(root: Path) -> list[str]:
    """Return a line for each circle, of modules first."""
    graph = import_graph(root)
    found = [f"modules import in a circle: {circle}" for circle in circles(graph)]
    return found + [f"packages import in a circle: {circle}" for circle in circles(rooms(graph))]


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return what each of our modules imports of our modules."""
    files = dict(modules(root))
    return {name: set(_imports(name, path, files)) for name, path in files.items()}


def rooms(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Fold modules into the packages directly below their distribution.

    A module that lies directly in its distribution is a room of its own; what a distribution's
    `__init__` offers belongs to none.
    """

    def room(name: str) -> str:
        return ".".join(name.split(".")[:2])

    folded: dict[str, set[str]] = {}
    for name, imported in graph.items():
        if "." in name:
            others = {room(other) for other in imported if "." in other}
            folded.setdefault(room(name), set()).update(others - {room(name)})
    return folded


def circles(graph: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield circles until none is left, each written as ``a → b → a``."""
    edges = {name: set(imported) for name, imported in graph.items()}
    while True:
        try:
            TopologicalSorter(edges).prepare()
        except CycleError as error:
            circle: list[str] = error.args[1][::-1]
            yield " → ".join(circle)
            edges[circle[0]].discard(circle[1])
        else:
            return


def _imports(name: str, path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases if alias.name in files)
            case ast.ImportFrom(module=str(source), names=aliases, level=0) if source in files:
                for alias in aliases:
                    inner = f"{source}.{alias.name}"
                    yield inner if inner in files else source
