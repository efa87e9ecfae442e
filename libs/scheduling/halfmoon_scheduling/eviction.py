"""In which order a full cache gives things up: policies by name.

A policy knows keys and their use, never sizes or pins: it proposes an order, and the cache
skips what it may not evict. Another policy is one class and one line in `POLICIES`.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(ABC, Generic[K]):
    """An order over the keys of a cache, the first to be evicted first."""

    @abstractmethod
    def insert(self, key: K) -> None:
        """A key that is not here yet is stored now. Changes state."""

    @abstractmethod
    def touch(self, key: K) -> None:
        """A key that is here was used. Changes state."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """A key that is here is gone. Changes state."""

    @abstractmethod
    def candidates(self) -> Iterator[K]:
        """All keys in eviction order. Leave the policy unchanged while iterating."""

    @abstractmethod
    def __len__(self) -> int: ...


class Fifo(EvictionPolicy[K]):
    """The one stored longest goes first, used or not."""

    def __init__(self) -> None:
        #: Keys, the oldest first.
        self._keys: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K) -> None:
        """See `EvictionPolicy.insert`."""
        self._keys[key] = None

    def touch(self, key: K) -> None:
        """Use does not count."""

    def remove(self, key: K) -> None:
        """See `EvictionPolicy.remove`."""
        del self._keys[key]

    def candidates(self) -> Iterator[K]:
        """See `EvictionPolicy.candidates`."""
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class Lru(Fifo[K]):
    """The one unused longest goes first."""

    def touch(self, key: K) -> None:
        """See `EvictionPolicy.touch`."""
        self._keys.move_to_end(key)


class Lfu(EvictionPolicy[K]):
    """The one used least often goes first; among equals the one unused longest."""

    def __init__(self) -> None:
        self._uses: dict[K, int] = {}
        #: Keys by number of uses, each group in order of use; no group is empty.
        self._groups: dict[int, OrderedDict[K, None]] = {}

    def insert(self, key: K) -> None:
        """See `EvictionPolicy.insert`."""
        self._place(key, 1)

    def touch(self, key: K) -> None:
        """See `EvictionPolicy.touch`."""
        uses = self._uses[key]
        self.remove(key)
        self._place(key, uses + 1)

    def remove(self, key: K) -> None:
        """See `EvictionPolicy.remove`."""
        uses = self._uses.pop(key)
        group = self._groups[uses]
        del group[key]
        if not group:
            del self._groups[uses]

    def candidates(self) -> Iterator[K]:
        """See `EvictionPolicy.candidates`."""
        for uses in sorted(self._groups):
            yield from self._groups[uses]

    def __len__(self) -> int:
        return len(self._uses)

    def _place(self, key: K, uses: int) -> None:
        self._uses[key] = uses
        self._groups.setdefault(uses, OrderedDict())[key] = None


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": Lru, "lfu": Lfu, "fifo": Fifo}  # type: ignore[type-arg]


def open_policy(name: str) -> "EvictionPolicy[K]":
    """A new, empty policy of this name.

    Raises:
        ValueError: no such policy; the text lists those there are.
    """
    try:
        return POLICIES[name]()
    except KeyError:
        known = ", ".join(sorted(POLICIES))
        raise ValueError(f"no eviction policy {name!r}, there are: {known}") from None
