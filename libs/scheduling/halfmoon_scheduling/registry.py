"""Register implementations by name, and look them up for settings, options and reports."""

from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar


class Named(Protocol):
    """An implementation that states the name by which operators choose it."""

    @property
    def name(self) -> str:
        """The name in settings, options and reports."""
        ...


T = TypeVar("T", bound=Named)


class Registry(Mapping[str, T]):
    """Map names to implementations, in the order in which they were registered."""

    def __init__(self, kind: str) -> None:
        """Start an empty registry.

        Args:
            kind: what is registered, for error messages, such as "placement mode".
        """
        self._kind = kind
        self._items: dict[str, T] = {}

    def register(self, item: T) -> T:
        """Add an implementation and return it, so that it serves as a decorator.

        Raises:
            ValueError: another implementation has this name.
        """
        if self._items.setdefault(item.name, item) is not item:
            raise ValueError(f"there are two {self._kind}s {item.name!r}")
        return item

    def check(self, name: str) -> str:
        """Return the name of a registered implementation.

        Raises:
            ValueError: it is not registered; the message lists the names that are.
        """
        if name not in self._items:
            raise ValueError(f"no {self._kind} {name!r}, there are: {self.names}")
        return name

    @property
    def names(self) -> str:
        """All names, separated by commas, for messages and help texts."""
        return ", ".join(self._items)

    def __getitem__(self, name: str) -> T:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
