"""Keep items in an order of predicted times, so that the soonest are found without visiting all.

The time of an item is ``value + weights · slopes``. Value and slopes belong to the item: the end of
its queue, and the seconds that a token takes there. The weights belong to the request that asks.

Items are kept in blocks of similar slopes, and sorted by their values within a block. The bound of
a block is its least value plus its least slopes times the weights: none of its items is sooner. So
a search computes one bound per block, and visits the first items of the few blocks whose bound is
within the limit. Bounds are those of real numbers; a caller allows for rounding in its limit.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

#: Seconds, or tokens that seconds are multiplied by; neither is negative.
Triple = tuple[float, float, float]

#: Items at which a block is cut in two, and below which it joins the next one.
_LONG, _SHORT = 192, 24
#: Spreads items of equal slopes over the blocks: an odd multiplier, so that numbers stay apart.
_SPREAD, _RANGE = 0x9E37_79B9_7F4A_7C15, 1 << 61


@dataclass(slots=True, eq=False)
class OrderedItem:
    """An item of a `LinearOrder`; unchanged while it is there."""

    value: float
    slopes: Triple
    #: Decides the order of items with equal values.
    tie: tuple[float, ...] = ()
    #: Its block: the time of its slopes at usual weights, and a number of its own. Set by `add`.
    place: tuple[float, int] = (0.0, 0)

    @property
    def entry(self) -> "tuple[float, tuple[float, ...], int, OrderedItem]":
        """The item as its block sorts it."""
        return self.value, self.tie, self.place[1], self


ItemT = TypeVar("ItemT", bound=OrderedItem)


@dataclass(slots=True)
class _Block(Generic[ItemT]):
    """Items of similar slopes; sorted."""

    entries: list[Any] = field(default_factory=list)
    #: No more than the least slopes of the items.
    slopes: Triple = (0.0, 0.0, 0.0)
    #: Items removed since `slopes` was exact.
    n_removed: int = 0

    def tighten(self) -> None:
        """Set the least slopes exactly."""
        rows = [entry[3].slopes for entry in self.entries]
        self.slopes = (
            min(row[0] for row in rows),
            min(row[1] for row in rows),
            min(row[2] for row in rows),
        )
        self.n_removed = 0


class LinearOrder(Generic[ItemT]):
    """Find the items with the least ``value + weights · slopes``."""

    def __init__(self, usual: Triple) -> None:
        """Create an empty order.

        Args:
            usual: weights that make slopes comparable, such as those of a usual request.
        """
        self._usual = usual
        self._blocks: list[_Block[ItemT]] = []
        #: First place of each block; a block holds the places up to the next one's first.
        self._firsts: list[tuple[float, int]] = []
        #: Least value and least slopes of each block.
        self._bounds: list[tuple[float, float, float, float]] = []
        self._n_added = 0

    def __len__(self) -> int:
        return sum(len(block.entries) for block in self._blocks)

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, item: ItemT) -> None:
        """Add an item that is not here."""
        self._n_added += 1
        a, b, c = item.slopes
        u, v, w = self._usual
        item.place = (a * u + b * v + c * w, self._n_added * _SPREAD % _RANGE)
        if not self._blocks:
            self._blocks.append(_Block([item.entry], item.slopes))
            self._firsts.append(item.place)
            self._bounds.append((item.value, a, b, c))
            return
        i = max(0, bisect_right(self._firsts, item.place) - 1)
        block = self._blocks[i]
        insort(block.entries, item.entry)
        x, y, z = block.slopes
        block.slopes = (min(a, x), min(b, y), min(c, z))
        self._firsts[i] = min(self._firsts[i], item.place)
        self._bounds[i] = (block.entries[0][0], *block.slopes)
        if len(block.entries) >= _LONG:
            self._cut(i)

    def remove(self, item: ItemT) -> None:
        """Remove an item that is here."""
        i = bisect_right(self._firsts, item.place) - 1
        block = self._blocks[i]
        del block.entries[bisect_left(block.entries, item.entry[:3])]
        block.n_removed += 1
        if len(block.entries) < _SHORT and i + 1 < len(self._blocks):
            block.entries = sorted(block.entries + self._blocks[i + 1].entries)
            self._drop(i + 1)
            block.tighten()
            if len(block.entries) >= _LONG:
                self._cut(i)
                return
        if not block.entries:
            self._drop(i)
            return
        if block.n_removed > len(block.entries):
            block.tighten()
        self._bounds[i] = (block.entries[0][0], *block.slopes)

    def search(
        self, weights: Triple, shift: float, limit: float, see: Callable[[ItemT], float]
    ) -> float:
        """Call `see` for each item whose time may be within a limit, which it may lower.

        Args:
            weights: the request's.
            shift: what to add to limits before values are compared with them.
            limit: the limit at first.
            see: returns the limit from then on.

        Returns:
            The limit at the end.
        """
        if not self._blocks:
            return limit
        u, v, w = weights
        bounds = [least + a * u + b * v + c * w for least, a, b, c in self._bounds]
        first = bounds.index(min(bounds))
        if not bounds[first] > limit + shift:
            limit = self._search_block(first, weights, shift, limit, see)
        most = limit + shift
        # "not more than": a hostile worker's infinite costs may make a bound that is no number.
        others = [i for i, bound in enumerate(bounds) if not bound > most and i != first]
        for i in sorted(others, key=bounds.__getitem__):
            if not bounds[i] > limit + shift:
                limit = self._search_block(i, weights, shift, limit, see)
        return limit

    def _search_block(
        self, i: int, weights: Triple, shift: float, limit: float, see: Callable[[ItemT], float]
    ) -> float:
        _, a, b, c = self._bounds[i]
        u, v, w = weights
        added = a * u + b * v + c * w
        most = limit + shift
        for value, _, _, item in self._blocks[i].entries:
            if value + added > most:
                break
            x, y, z = item.slopes
            if value + (x * u + y * v + z * w) > most:
                continue
            limit = see(item)
            most = limit + shift
        return limit

    def _cut(self, i: int) -> None:
        """Cut a block in two halves, by the places of its items."""
        block = self._blocks[i]
        places = sorted(entry[3].place for entry in block.entries)
        middle = places[len(places) // 2]
        later: _Block[ItemT] = _Block([e for e in block.entries if e[3].place >= middle])
        block.entries = [e for e in block.entries if e[3].place < middle]
        self._blocks.insert(i + 1, later)
        self._firsts.insert(i + 1, middle)
        self._bounds.insert(i + 1, (0.0, 0.0, 0.0, 0.0))
        for at, half in ((i, block), (i + 1, later)):
            half.tighten()
            self._bounds[at] = (half.entries[0][0], *half.slopes)

    def _drop(self, i: int) -> None:
        del self._blocks[i], self._firsts[i], self._bounds[i]

    def check(self) -> None:
        """Check that blocks are sorted, and that no item is sooner than its block's bound."""
        assert len(self._blocks) == len(self._firsts) == len(self._bounds)
        assert self._firsts == sorted(self._firsts)
        for i, block in enumerate(self._blocks):
            assert block.entries and len(block.entries) < _LONG
            assert block.entries == sorted(block.entries, key=lambda entry: entry[:3])
            assert self._bounds[i] == (block.entries[0][0], *block.slopes)
            for value, tie, serial, item in block.entries:
                assert (value, tie, serial) == item.entry[:3]
                assert all(x <= y for x, y in zip(block.slopes, item.slopes, strict=True))
                assert self._firsts[i] <= item.place
                assert i + 1 == len(self._blocks) or item.place < self._firsts[i + 1]
