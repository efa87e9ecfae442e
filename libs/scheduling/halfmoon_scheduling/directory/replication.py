"""Copy hot prefixes to further kvstores in the background, and drop copies that became cold.

Placement spreads hot prefixes by itself, one transfer after the other, while requests wait for
them. This policy does so ahead of requests. It counts the uses of each block, and gives a prefix
one more holder for every `hot_uses` uses within a half-life. Its copies are dropped when they have
become cold.

It only proposes. A kvstore is the only authority over its memory and may refuse a copy or a drop;
its KV events tell what it did. Copied bytes are bounded per second, and copies under way per
kvstore.
"""

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from halfmoon_protocol.ids import BlockHash, Ticket, WorkerId
from halfmoon_scheduling.directory.prefix_index import PrefixIndex

#: Most blocks whose uses are counted, and most hot prefixes.
MAX_COUNTED = 100_000
MAX_PREFIXES = 256
#: A copy is dropped when its uses fall below this share of those that made it.
COLD_SHARE = 0.25
#: Most blocks of one copy: a long prefix takes several.
MAX_COPIED_BLOCKS = 64
#: Seconds without an answer after which a copy is taken to have failed.
COPY_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Heat:
    """Uses of a block, halved every half-life."""

    uses: float
    at_s: float

    def now(self, now: float, half_life_s: float) -> float:
        return float(self.uses * 0.5 ** ((now - self.at_s) / half_life_s))


@dataclass(frozen=True, slots=True)
class CopyPrefix:
    """Blocks to copy from one kvstore to another."""

    ticket: Ticket
    source: WorkerId
    target: WorkerId
    #: In prefix order, with their tokens; `parent` is the block before the first.
    hashes: tuple[BlockHash, ...]
    token_ids: tuple[int, ...]
    parent: BlockHash | None


@dataclass(frozen=True, slots=True)
class DropCopies:
    """Copies to drop, children before parents."""

    kvstore: WorkerId
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class _Prefix:
    hashes: tuple[BlockHash, ...]
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Replicator:
    """Count the uses of blocks, and propose copies and drops."""

    bytes_per_s: float
    hot_uses: float
    half_life_s: float
    _heat: OrderedDict[BlockHash, _Heat] = field(default_factory=OrderedDict, init=False)
    #: Hot prefixes by their last block, in order of use.
    _prefixes: OrderedDict[BlockHash, _Prefix] = field(default_factory=OrderedDict, init=False)
    #: Copies under way and their deadlines; at most one for each target.
    _copying: dict[WorkerId, tuple[CopyPrefix, float]] = field(default_factory=dict, init=False)
    #: Blocks that a kvstore holds because of our copies, unless it has dropped them since.
    _copied: dict[WorkerId, dict[BlockHash, None]] = field(default_factory=dict, init=False)
    #: Kvstores that refused a copy, and the time until which none is proposed to them.
    _refused_until_s: dict[WorkerId, float] = field(default_factory=dict, init=False)
    _budget_bytes: float = field(default=0.0, init=False)
    _budget_at_s: float = field(default=0.0, init=False)
    _n_copies: int = field(default=0, init=False)

    def on_used(
        self,
        hashes: Sequence[BlockHash],
        token_ids: tuple[int, ...],
        block_size: int,
        now: float,
    ) -> None:
        """Count a use of a prompt's cached prefix."""
        n_hot = 0
        for block in hashes:
            heat = self._heat.get(block)
            if heat is None:
                heat = self._heat[block] = _Heat(0.0, now)
            heat.uses, heat.at_s = heat.now(now, self.half_life_s) + 1.0, now
            self._heat.move_to_end(block)
            n_hot += heat.uses >= self.hot_uses
        while len(self._heat) > MAX_COUNTED:
            self._heat.popitem(last=False)
        if n_hot:  # a block is used whenever its child is, so the hot ones come first
            prefix = _Prefix(tuple(hashes[:n_hot]), token_ids[: n_hot * block_size])
            self._prefixes[prefix.hashes[-1]] = prefix
            self._prefixes.move_to_end(prefix.hashes[-1])
            if len(self._prefixes) > MAX_PREFIXES:
                self._prefixes.popitem(last=False)

    def plan(
        self,
        index: PrefixIndex,
        room: Mapping[WorkerId, int],
        *,
        block_bytes: int,
        block_size: int,
        now: float,
        unreadable: Container[WorkerId] = (),
    ) -> list[CopyPrefix | DropCopies]:
        """Return the copies and drops to start now; the copies count as under way from now on.

        Args:
            index: the holders of blocks.
            room: live kvstores that may receive copies, each with the blocks that fit without
                evictions.
            block_bytes: bytes of a block.
            block_size: tokens of a block.
            now: seconds.
            unreadable: kvstores of servers, which no other worker reads.
        """
        for target, (_, until_s) in list(self._copying.items()):
            if until_s <= now:
                del self._copying[target]
        self._earn(block_bytes, now)
        planned: list[CopyPrefix | DropCopies] = []
        hottest = sorted(
            self._prefixes.values(), key=lambda p: (-self._uses(p.hashes[-1], now), p.hashes[-1])
        )
        for prefix in hottest:
            lengths = {
                kvstore: n
                for kvstore, n in index.longest_prefix(prefix.hashes).items()
                if kvstore not in unreadable
            }
            copy = self._copy_of(prefix, lengths, room, block_bytes, block_size, now)
            if copy is not None:
                planned.append(copy)
        self._cool(now)
        return planned + self._drops(index, room, now)

    def on_copied(self, target: WorkerId, ticket: Ticket, n_blocks: int) -> None:
        """Record a copy that a kvstore has made of the first `n_blocks` blocks."""
        copy = self._take(target, ticket)
        if copy is not None:
            ours = self._copied.setdefault(target, {})
            ours.update(dict.fromkeys(copy.hashes[:n_blocks]))

    def on_refused(self, target: WorkerId, ticket: Ticket, until_s: float) -> None:
        """Record that a kvstore refused a copy, and takes none until a time."""
        if self._take(target, ticket) is not None:
            self._refused_until_s[target] = until_s

    def on_lost(self, kvstore: WorkerId) -> None:
        """Forget a kvstore that is gone, with its copies."""
        self._copied.pop(kvstore, None)
        self._copying.pop(kvstore, None)
        self._refused_until_s.pop(kvstore, None)

    def under_way(self) -> list[CopyPrefix]:
        """Return the copies that no kvstore has answered yet."""
        return [copy for copy, _ in self._copying.values()]

    # -- internal ----------------------------------------------------------------------------

    def _uses(self, block: BlockHash, now: float) -> float:
        heat = self._heat.get(block)
        return 0.0 if heat is None else heat.now(now, self.half_life_s)

    def _earn(self, block_bytes: int, now: float) -> None:
        """Grow the budget with time, up to one second's bytes or one block."""
        earned = self._budget_bytes + self.bytes_per_s * (now - self._budget_at_s)
        self._budget_bytes = min(earned, max(self.bytes_per_s, float(block_bytes)))
        self._budget_at_s = now

    def _copy_of(
        self,
        prefix: _Prefix,
        lengths: Mapping[WorkerId, int],
        room: Mapping[WorkerId, int],
        block_bytes: int,
        block_size: int,
        now: float,
    ) -> CopyPrefix | None:
        n_blocks = max(lengths.values(), default=0)
        holders = sorted(k for k, length in lengths.items() if length == n_blocks)
        n_wanted = 1 + int(self._uses(prefix.hashes[-1], now) / self.hot_uses)
        here = set(prefix.hashes)
        n_coming = sum(copy.hashes[0] in here for copy, _ in self._copying.values())
        if not n_blocks or len(holders) + n_coming >= n_wanted:
            return None
        targets = [
            (-lengths.get(kvstore, 0), -n_free, kvstore)
            for kvstore, n_free in room.items()
            if kvstore not in holders
            and kvstore not in self._copying
            and self._refused_until_s.get(kvstore, now) <= now
        ]
        n_affordable = int(self._budget_bytes // block_bytes)
        if not targets or not n_affordable:
            return None
        target = min(targets)[-1]
        first = lengths.get(target, 0)
        stop = min(n_blocks, first + min(n_affordable, MAX_COPIED_BLOCKS))
        sending = [copy.source for copy, _ in self._copying.values()]
        source = min(holders, key=lambda k: (sending.count(k), k))
        self._n_copies += 1
        copy = CopyPrefix(
            Ticket(f"copy-{self._n_copies}"),
            source,
            target,
            prefix.hashes[first:stop],
            prefix.token_ids[first * block_size : stop * block_size],
            prefix.hashes[first - 1] if first else None,
        )
        self._budget_bytes -= len(copy.hashes) * block_bytes
        self._copying[target] = (copy, now + COPY_TIMEOUT_S)
        return copy

    def _cool(self, now: float) -> None:
        """Forget prefixes that are no longer hot."""
        cold = COLD_SHARE * self.hot_uses
        for last in [last for last in self._prefixes if self._uses(last, now) < cold]:
            del self._prefixes[last]

    def _drops(
        self, index: PrefixIndex, kvstores: Container[WorkerId], now: float
    ) -> list[CopyPrefix | DropCopies]:
        drops: list[CopyPrefix | DropCopies] = []
        for kvstore, blocks in self._copied.items():
            cold = [b for b in blocks if self._uses(b, now) < COLD_SHARE * self.hot_uses]
            held = [b for b in cold if index.n_holders(b) > 1]  # never the last copy
            for block in cold:
                del blocks[block]
            if held and kvstore in kvstores:
                drops.append(DropCopies(kvstore, tuple(reversed(held))))
        return drops

    def _take(self, target: WorkerId, ticket: Ticket) -> CopyPrefix | None:
        copy, _ = self._copying.get(target, (None, 0.0))
        if copy is None or copy.ticket != ticket:
            return None
        del self._copying[target]
        return copy

    def check(self) -> None:
        """Check all bounds."""
        assert len(self._heat) <= MAX_COUNTED
        assert len(self._prefixes) <= MAX_PREFIXES
        assert self._budget_bytes >= 0
        assert all(copy.target == target for target, (copy, _) in self._copying.items())
