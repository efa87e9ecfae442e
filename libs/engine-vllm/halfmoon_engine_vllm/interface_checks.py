"""Compare what our code expects of another package's interface with what is installed.

Knows nothing of that package: expectations name its objects by their import paths.
"""

import dataclasses
import inspect
import re
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
from typing import Any


class _Gone(Exception):
    """A part of a path is not there; the text says which."""


@dataclass(frozen=True)
class Called:
    """A function, method or class that our code calls."""

    path: str
    #: Parameters that we pass by their place, in order; those that we pass by name.
    by_place: tuple[str, ...] = ()
    by_name: tuple[str, ...] = ()

    def difference(self) -> str:
        """Return what moved since this was written; empty if nothing did."""
        try:
            parameters = _parameters(self.path)
        except _Gone as gone:
            return str(gone)
        names = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
        takes_any_name = len(names) < len(parameters)
        for place, name in enumerate(self.by_place):
            found = names[place] if place < len(names) else ""
            if found != name:
                return f"{self.path}: {_instead(name, found, names, place)}"
        for name in self.by_name:
            if name not in names and not takes_any_name:
                return f"{self.path}: parameter `{name}` is gone"
        for each in parameters:
            needed = each.default is each.empty and each.kind not in (
                each.VAR_POSITIONAL,
                each.VAR_KEYWORD,
            )
            if needed and each.name not in {*self.by_place, *self.by_name}:
                return f"{self.path}: parameter `{each.name}` is new, and must be given"
        return ""


@dataclass(frozen=True)
class Overridden:
    """A method that our code replaces, and that the other package calls."""

    path: str
    #: All parameters, without `self`.
    parameters: tuple[str, ...]

    def difference(self) -> str:
        """Return what moved since this was written; empty if nothing did."""
        try:
            found = [each.name for each in _parameters(self.path)]
        except _Gone as gone:
            return str(gone)
        for place, name in enumerate(self.parameters):
            if place >= len(found) or found[place] != name:
                other = found[place] if place < len(found) else ""
                return f"{self.path}: {_instead(name, other, found, place)}"
        if len(found) > len(self.parameters):
            return f"{self.path}: parameter `{found[len(self.parameters)]}` is new"
        return ""


@dataclass(frozen=True)
class Holds:
    """A class or module whose attributes our code reads or sets."""

    path: str
    names: tuple[str, ...]

    def difference(self) -> str:
        """Return what moved since this was written; empty if nothing did."""
        try:
            holder = _resolve(self.path)
        except _Gone as gone:
            return str(gone)
        for name in self.names:
            if not _has(holder, name):
                return f"{self.path}: attribute `{name}` is gone"
        return ""


@dataclass(frozen=True)
class Implemented:
    """An abstract class that our code implements."""

    path: str
    #: The abstract methods that ours has.
    methods: tuple[str, ...]

    def difference(self) -> str:
        """Return what moved since this was written; empty if nothing did."""
        try:
            base = _resolve(self.path)
        except _Gone as gone:
            return str(gone)
        new = sorted(set(base.__abstractmethods__) - set(self.methods))
        return f"{self.path}: method `{new[0]}` is new, and must be implemented" if new else ""


Expectation = Called | Overridden | Holds | Implemented


def _instead(name: str, found: str, names: list[str], place: int) -> str:
    if name in names:
        return f"parameter `{name}` is number {names.index(name) + 1}, it was {place + 1}"
    return f"parameter `{name}` is gone" + (f", `{found}` is in its place" if found else "")


def _resolve(path: str) -> Any:
    """Import as much of a path as there are modules, and follow the rest as attributes.

    Raises:
        _Gone: nothing is there, or its import failed.
    """
    parts = path.split(".")
    for n_modules in range(len(parts), 0, -1):
        module = ".".join(parts[:n_modules])
        try:
            found: Any = import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module}.".startswith(f"{error.name}."):
                continue  # it is no module, or the one above it is gone too
            raise _Gone(f"{path}: it can't be imported: {error}") from None
        except Exception as error:  # of another package's code
            raise _Gone(f"{path}: it can't be imported: {error}") from None
        for place in range(n_modules, len(parts)):
            try:
                found = getattr(found, parts[place])
            except AttributeError:
                here = ".".join(parts[:place])
                raise _Gone(f"{path}: `{parts[place]}` of {here} is gone") from None
        return found
    raise _Gone(f"{path}: {parts[0]} is not installed")


def _parameters(path: str) -> list[inspect.Parameter]:
    """Return the parameters of a callable, without `self`.

    Raises:
        _Gone: it is not there.
    """
    found = _resolve(path)
    parameters = list(inspect.signature(found).parameters.values())
    owner, _, name = path.rpartition(".")
    holder = _resolve(owner)
    if isinstance(holder, type) and isinstance(inspect.getattr_static(holder, name), FunctionType):
        return parameters[1:]
    return parameters


def _has(holder: Any, name: str) -> bool:
    """Return whether objects of a class, or a module, have an attribute of this name."""
    if hasattr(holder, name):
        return True
    if not isinstance(holder, type):
        return False
    if dataclasses.is_dataclass(holder) and name in {f.name for f in dataclasses.fields(holder)}:
        return True
    return any(_declares(base, name) for base in holder.__mro__[:-1])


def _declares(base: type, name: str) -> bool:
    if name in vars(base).get("__annotations__", {}):
        return True
    try:
        source = inspect.getsource(base)
    except (OSError, TypeError):  # written in C
        return False
    return re.search(rf"\bself\.{name}\b(:[^=\n]+)? *=[^=]", source) is not None
