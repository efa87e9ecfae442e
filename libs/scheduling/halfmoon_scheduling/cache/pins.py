"""Pins of a kvstore: blocks that go last, or never.

    soft    goes when nothing else can
    hard    does not go, nor does anything before it in its prompt, since a block without its
            prefix is of no use

A pin is on one block, until it is taken back or its time is over; the last word on a block
counts. It says nothing of readers (leases do) and nothing of tiers: it holds wherever the block
is. What hard pins hold together is bounded, so that there is always room left to work with.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from halfmoon_protocol.ids import BlockHash

PinKind = Literal["soft", "hard"]


class PinRefused(Exception):
    """A pin that can't be: the text says why, and what would help."""


class Pin(NamedTuple):
    """What is said of one block."""

    kind: PinKind
    #: When it ends; infinite: when it is taken back.
    until_s: float


@dataclass(slots=True)
class _Held:
    """A block that a hard pin holds: its own, or one of a block that continues it."""

    parent: BlockHash | None
    #: Hard pins on it and on what continues it.
    n: int


class Pins:
    """The pins of one node."""

    def __init__(self, max_held: int = 0) -> None:
        """No pins; `max_held`: blocks that hard pins may hold together."""
        self.max_held = max_held
        self._pins: dict[BlockHash, Pin] = {}
        #: Exactly the blocks with a soft pin.
        self._soft: dict[BlockHash, None] = {}
        #: Blocks with a hard pin, and those before them; parents as they were when pinned.
        self._held: dict[BlockHash, _Held] = {}
        #: No pin ends before this.
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
        """Blocks that hard pins hold, those before the pinned ones included."""
        return len(self._held)

    @property
    def soft(self) -> Mapping[BlockHash, object]:
        """Blocks that go last; read only."""
        return self._soft

    @property
    def held(self) -> Mapping[BlockHash, object]:
        """Blocks that do not go; read only."""
        return self._held

    def blocks(self) -> list[BlockHash]:
        """All blocks with a pin of their own."""
        return list(self._pins)

    def get(self, block: BlockHash) -> Pin | None:
        """The pin on this very block."""
        return self._pins.get(block)

    def pin(self, block: BlockHash, pin: Pin, before: Iterable[BlockHash]) -> None:
        """Pin a block, in place of what was said of it before.

        Args:
            block: it.
            pin: what is said.
            before: the blocks before it in its prompt as far as they are stored, the nearest
                first.

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
        """Take a pin back, or forget that of a block that is gone; whether there was one."""
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
        """Take back the pins whose time is over."""
        if now < self._soonest_s:
            return
        for block in [block for block, pin in self._pins.items() if pin.until_s <= now]:
            self.unpin(block)
        self._soonest_s = min((pin.until_s for pin in self._pins.values()), default=float("inf"))

    def check(self) -> None:
        """Audit: each hard pin is counted at its block and at all before it, and only there."""
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
