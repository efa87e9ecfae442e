"""Keep regions of owners mapped, the least recently used ones dropped beyond a bound."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from halfmoon_transfer.planning.transfer_plan import Slice


class MappedRegions:
    """Mapped memory by owner's address and region key; None for a region that can't be mapped."""

    def __init__(self, max_mappings: int) -> None:
        self._max_mappings = max_mappings
        self._lock = threading.Lock()
        #: The most recently used last.
        self._mappings: OrderedDict[tuple[str, bytes], memoryview | None] = OrderedDict()

    def __len__(self) -> int:
        with self._lock:
            return sum(each is not None for each in self._mappings.values())

    def holds_all(self, address: str, slices: Iterable[Slice]) -> bool:
        """Return whether all regions of these slices are mapped."""
        return all(self._mappings.get((address, each.remote.key)) is not None for each in slices)

    def use(self, place: tuple[str, bytes]) -> memoryview | None:
        """Return a region's memory if it is mapped."""
        with self._lock:
            memory = self._mappings.get(place)
            if memory is not None:
                self._mappings.move_to_end(place)
            return memory

    def get(
        self,
        place: tuple[str, bytes],
        make: Callable[[], memoryview | None],
        revoked: set[bytes],
    ) -> memoryview | None:
        """Return a region's memory, mapped by `make` if it is not known; raises what `make` does.

        Args:
            place: the owner's address and the region's key.
            make: maps the region, or returns None if it can't be mapped.
            revoked: keys that were revoked since the batch began: their memory is not kept.
        """
        with self._lock:
            if place in self._mappings:
                self._mappings.move_to_end(place)
                return self._mappings[place]
        made = make()
        with self._lock:
            memory = self._mappings.setdefault(place, made)
            while len(self._mappings) > self._max_mappings:
                # Unmapped with its last view: another thread may be copying.
                self._mappings.popitem(last=False)
        if place[1] in revoked:
            # Another thread may have read that between the answer and now.
            self.drop(place)
        return memory

    def drop(self, place: tuple[str, bytes]) -> None:
        """Let go of one region."""
        with self._lock:
            self._mappings.pop(place, None)

    def drop_owner(self, address: str) -> None:
        """Let go of all regions of one owner."""
        with self._lock:
            for place in [place for place in self._mappings if place[0] == address]:
                del self._mappings[place]
