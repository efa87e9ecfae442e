"""Read the comments above fields: the ``#:`` lines that the schemas repeat."""

import sys
from functools import cache
from pathlib import Path

import griffe


def field_docs(kind: type) -> dict[str, str]:
    """Return the comments of a class's own attributes, each as one line."""
    package, _, name = f"{kind.__module__}.{kind.__qualname__}".partition(".")
    documented = _package(package)[name]
    return {
        name: " ".join(attribute.docstring.value.split())
        for name, attribute in documented.attributes.items()
        if attribute.docstring is not None
    }


@cache
def _package(name: str) -> griffe.Module:
    """Return what griffe read from the sources, none of which it imports."""
    package = griffe.load(
        name,
        search_paths=[Path(str(sys.modules[name].__file__)).resolve().parents[1]],
        extensions=griffe.load_extensions("griffe_sphinx"),
        allow_inspection=False,
    )
    assert isinstance(package, griffe.Module)
    return package
