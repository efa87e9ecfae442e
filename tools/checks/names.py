"""Find one name with two meanings: public classes and modules.

A public class name is defined once in `libs/` and `services/`, and a module name once in a
distribution: a reader who meets `Lease` or `frames.py` finds one of it.
"""

import ast
from collections import defaultdict
from pathlib import Path

from tools.checks.sources import modules

#: Module names that every package may have.
COMMON = {"__init__", "__main__"}


def faults(root: Path) -> list[str]:
    """Return a line for each name that stands for two things."""
    classes: dict[str, list[str]] = defaultdict(list)
    stems: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, path in modules(root):
        if path.stem not in COMMON:
            stems[name.split(".")[0], path.stem].append(name)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(name)
    return [
        f"class {name} is defined in {' and '.join(places)}: name one of them differently"
        for name, places in sorted(classes.items())
        if len(places) > 1
    ] + [
        f"module {stem} occurs twice in {package}: {' and '.join(places)}"
        for (package, stem), places in sorted(stems.items())
        if len(places) > 1
    ]
