"""Count how often cached prefixes of prompts were used lately.

A prompt counts for its longest cached prefix, and for each shorter one that ended another prompt's
match. So a system prompt of a hundred conversations is one prefix with a hundred uses. Each
conversation has a prefix of its own below it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon_protocol.ids import BlockHash, RequestId

#: Most prefixes that are counted; the least recently used one makes room.
MAX_PREFIXES = 1024
#: A prefix is not reported beside a longer one that has this share of its uses.
SAME_SHARE = 0.9
#: Prefixes with fewer uses within a half-life are not reported.
MIN_USES = 0.5


@dataclass(slots=True)
class _Prefix:
    n_blocks: int
    #: The next shorter prefix that was counted when this one was added.
    parent: BlockHash | None
    uses: float
    at_s: float
    last: RequestId


class HotPrefixUse(NamedTuple):
    """A frequently used prefix, named by its last block."""

    block: BlockHash
    n_blocks: int
    #: Number of uses, halved with every half-life.
    uses: float
    #: The request that used it last.
    last: RequestId


class PrefixUseCounter:
    """Count uses of cached prefixes."""

    def __init__(self, half_life_s: float) -> None:
        """Create a counter without uses.

        Args:
            half_life_s: seconds after which a use counts half.
        """
        self._half_life_s = half_life_s
        self._prefixes: OrderedDict[BlockHash, _Prefix] = OrderedDict()

    def on_use(self, blocks: Sequence[BlockHash], request_id: RequestId, now: float) -> None:
        """Record that a request's prompt begins with these cached blocks."""
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
        """Return up to `n` prefixes, the most used first."""
        uses = {block: self._uses(prefix, now) for block, prefix in self._prefixes.items()}
        #: Uses of the most used prefix among those one step longer.
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
