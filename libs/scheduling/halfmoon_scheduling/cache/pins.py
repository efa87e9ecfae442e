"""Pin blocks of a kvstore: evict them last, or never.

    soft    is evicted when no other block can be
    hard    is not evicted, and neither are the blocks before it in its prompt, since a block
            without its prefix is useless

A pin is on one block, until it is removed or expires; the latest pin on a block counts. It is
independent of leases and of tiers. The blocks that hard pins hold together are bounded, so that
there is always room left for others.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from halfmoon_protocol.ids import BlockHash

PinKind = Literal["soft", "hard"]


class PinRefused(Exception):
    """A pin that is not possible; the message says why, and what would help."""


class Pin(NamedTuple):
    """A pin on one block."""

    kind: PinKind
    #: When it expires; infinite: when it is removed.
    until_s: float


@dataclass(slots=True)
class _Held:
    """A block that a hard pin holds: one on it, or on a block that continues it."""

    parent: BlockHash | None
    #: Hard pins on it and on blocks that continue it.
    n: int


class Pins:
    """Keep the pins of one node."""

    def __init__(self, max_held: int = 0) -> None:
        """Start without pins.

        Args:
            max_held: blocks that hard pins may hold together.
        """
        self.max_held = max_held
        self._pins: dict[BlockHash, Pin] = {}
        #: Exactly the blocks with a soft pin.
        self._soft: dict[BlockHash, None] = {}
        #: Blocks with a hard pin and the blocks before them; parents as at the time of the pin.
        self._held: dict[BlockHash, _Held] = {}
        #: The earliest time at which a pin may expire.
        self._soonest_s = float("inf")

    @property
    def n_soft(self) -> int:
        """Blocks with a soft pin."""
        return len(self._soft)

    @property
    def n_hard(self) -> int:
        """Blocks with a hard pin."""
        return len(self._pins) - len(self._soft)

    @property
    def n_held(self) -> int:
        """Blocks that hard pins hold, including the blocks before pinned ones."""
        return len(self._held)

    @property
    def soft(self) -> Mapping[BlockHash, object]:
        """Blocks with a soft pin, which are evicted last; read only."""
        return self._soft

    @property
    def held(self) -> Mapping[BlockHash, object]:
        """Blocks that hard pins hold, which are not evicted; read only."""
        return self._held

    def blocks(self) -> list[BlockHash]:
        """Return all blocks with a pin of their own."""
        return list(self._pins)

    def get(self, block: BlockHash) -> Pin | None:
        """Return the pin on this block itself; None without one."""
        return self._pins.get(block)

    def pin(self, block: BlockHash, pin: Pin, before: Iterable[BlockHash]) -> None:
        """Pin a block, in place of an earlier pin on it.

        Args:
            block: the block.
            pin: the pin.
            before: the stored blocks before it in its prompt, the nearest first.

        Raises:
            PinRefused: more than `max_held` blocks would be held; nothing changes.
        """
        chain = [block, *before] if pin.kind == "hard" else []
        n_more = sum(each not in self._held for each in chain)
        if len(self._held) + n_more > self.max_held and chain:
            raise PinRefused(
                f"a hard pin on {block.hex()} would hold {n_more} more blocks, and "
                f"{len(self._held)} of {self.max_held} that hard pins may hold are held: unpin "
                f"others, pin it softly, or raise hard_pin_share"
            )
        self.unpin(block)
        self._pins[block] = pin
        self._soonest_s = min(self._soonest_s, pin.until_s)
        if pin.kind == "soft":
            self._soft[block] = None
        for each, parent in zip(chain, [*chain[1:], None], strict=False):
            held = self._held.setdefault(each, _Held(parent, 0))
            held.n += 1
            if held.parent is None:
                held.parent = parent

    def unpin(self, block: BlockHash) -> bool:
        """Remove the pin on a block; return whether there was one."""
        pin = self._pins.pop(block, None)
        self._soft.pop(block, None)
        if pin is not None and pin.kind == "hard":
            each: BlockHash | None = block
            while each is not None:
                held = self._held[each]
                held.n -= 1
                if not held.n:
                    del self._held[each]
                each = held.parent
        return pin is not None

    def expire(self, now: float) -> None:
        """Remove expired pins."""
        if now < self._soonest_s:
            return
        for block in [block for block, pin in self._pins.items() if pin.until_s <= now]:
            self.unpin(block)
        self._soonest_s = min((pin.until_s for pin in self._pins.values()), default=float("inf"))

    def check(self) -> None:
        """Check that each hard pin is counted at its block and at all blocks before it."""
        assert self._soft.keys() == {b for b, pin in self._pins.items() if pin.kind == "soft"}
        counts = dict.fromkeys(self._held, 0)
        for block, pin in self._pins.items():
            assert pin.until_s >= self._soonest_s, "a pin would outlive its time"
            each: BlockHash | None = block if pin.kind == "hard" else None
            while each is not None:
                counts[each] += 1
                each = self._held[each].parent
        assert counts == {block: held.n for block, held in self._held.items()}
        assert len(self._held) <= self.max_held
