"""Decide what a grant allows: some ranges of one region, to read or to write, until a deadline.

A grant has a key of its own. Its offsets are those of the region, so a holder uses it as it would
use the region. It shows less of the region than the region's own key, and it can be taken back
alone.
"""

from bisect import bisect_right
from collections.abc import Iterable
from copy import copy
from typing import Literal

from halfmoon_transfer.interface import Op
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus

#: What a holder may do.
GrantedOps = Op | Literal["both"]


class RegionGrant:
    """Allow the holder of one key some accesses; the object never changes."""

    def __init__(
        self, ranges: Iterable[tuple[int, int]], op: GrantedOps, n_bytes: int, expires_at: float
    ) -> None:
        """Check the ranges, and join those that touch.

        Args:
            ranges: offset and length of each, in any order.
            op: what the holder may do with them.
            n_bytes: length of the region.
            expires_at: when the key ends, on the clock of the region table.

        Raises:
            ValueError: no range, or one that is empty or not within the region.
        """
        self.op = op
        self.expires_at = expires_at
        #: Sorted and disjoint, none touching the next: an access lies in one of them or is refused.
        self._starts: list[int] = []
        self._ends: list[int] = []
        for offset, length in sorted(ranges):
            if offset < 0 or length < 1 or offset + length > n_bytes:
                raise ValueError(
                    f"can't grant {length} bytes at offset {offset} of a region of {n_bytes} "
                    "bytes; a range has at least one byte and lies within the region"
                )
            if self._ends and offset <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], offset + length)
            else:
                self._starts.append(offset)
                self._ends.append(offset + length)
        if not self._starts:
            raise ValueError("can't grant nothing: name at least one range")

    def until(self, expires_at: float) -> "RegionGrant":
        """Return a grant of the same that ends at another time."""
        changed = copy(self)
        changed.expires_at = expires_at
        return changed

    def refusal(self, offset: int, length: int, *, write: bool, now: float) -> AccessRefused | None:
        """Return why an access is refused, or None if it is allowed; in O(log ranges)."""
        if now >= self.expires_at:
            return AccessRefused(AccessStatus.UNKNOWN_KEY)
        if self.op != "both" and write != (self.op == "write"):
            return AccessRefused(AccessStatus.NOT_GRANTED)
        index = bisect_right(self._starts, offset) - 1
        if index < 0 or offset + length > self._ends[index]:
            return AccessRefused(AccessStatus.NOT_GRANTED)
        return None
