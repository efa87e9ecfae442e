"""Which prefixes prompts have in common: how often each cached one was asked for of late.

A prompt counts for the longest prefix of it that is cached anywhere, and for each shorter one
that another prompt ended at before. So a system prompt that a hundred conversations begin with
is one prefix with a hundred uses, and each conversation is one of its own below it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon_protocol.ids import BlockHash, RequestId

#: Prefixes that are counted at the most; the one not used for longest makes room.
MAX_PREFIXES = 1024
#: A prefix is not told beside a longer one that has this share of its uses.
SAME_SHARE = 0.9
#: Fewer uses than this within a half-life are not worth telling.
MIN_USES = 0.5


@dataclass(slots=True)
class _Prefix:
    n_blocks: int
    #: The next shorter one that was counted when this one was first.
    parent: BlockHash | None
    uses: float
    at_s: float
    last: RequestId


class HotPrefixUse(NamedTuple):
    """A prefix that is asked for again and again, named by its last block."""

    block: BlockHash
    n_blocks: int
    #: Halved with every half-life.
    uses: float
    #: The request that used it last.
    last: RequestId


class PrefixUseCounter:
    """Counts uses of cached prefixes."""

    def __init__(self, half_life_s: float) -> None:
        """Nothing was used.

        Args:
            half_life_s: seconds in which a use comes to count half.
        """
        self._half_life_s = half_life_s
        self._prefixes: OrderedDict[BlockHash, _Prefix] = OrderedDict()

    def used(self, blocks: Sequence[BlockHash], request_id: RequestId, now: float) -> None:
        """A request's prompt begins with these blocks, which are cached."""
        if not blocks:
            return
        parent: BlockHash | None = None
        for block in blocks:
            if (prefix := self._prefixes.get(block)) is not None:
                prefix.uses = self._uses(prefix, now) + 1.0
                prefix.at_s, prefix.last = now, request_id
                self._prefixes.move_to_end(block)
                parent = block
        if blocks[-1] not in self._prefixes:
            self._prefixes[blocks[-1]] = _Prefix(len(blocks), parent, 1.0, now, request_id)
            if len(self._prefixes) > MAX_PREFIXES:
                self._prefixes.popitem(last=False)

    def hottest(self, n: int, now: float) -> list[HotPrefixUse]:
        """Up to `n` prefixes, the one with the most uses first."""
        uses = {block: self._uses(prefix, now) for block, prefix in self._prefixes.items()}
        #: Uses of the most used of those that are one step longer.
        longer: dict[BlockHash, float] = {}
        for block, prefix in self._prefixes.items():
            if prefix.parent is not None:
                longer[prefix.parent] = max(longer.get(prefix.parent, 0.0), uses[block])
        hot = [
            HotPrefixUse(block, prefix.n_blocks, uses[block], prefix.last)
            for block, prefix in self._prefixes.items()
            if uses[block] >= MIN_USES and longer.get(block, 0.0) < SAME_SHARE * uses[block]
        ]
        return sorted(hot, key=lambda p: (-p.uses, -p.n_blocks, p.block))[:n]

    def _uses(self, prefix: _Prefix, now: float) -> float:
        return float(prefix.uses * 0.5 ** ((now - prefix.at_s) / self._half_life_s))
