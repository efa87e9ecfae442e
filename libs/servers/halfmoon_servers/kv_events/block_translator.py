"""Translate a server's KV events into events with Halfmoon's block hashes.

A server chains its own hashes: 64-bit numbers or digests that depend on its version and settings.
Its events carry the tokens and the parent, so each block gets the hash that the conductor computes
for the same prefix and salt. A block is held while any medium of the server has it.

Blocks that match no request of the conductor are skipped and counted. They are those of adapters,
with images or embeddings, of another block size, and of sliding windows. A block whose parent is
unknown, because an event was lost, is skipped too.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from halfmoon_protocol.blocks import check_block_size, child_hashes, root_hash
from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from halfmoon_servers.kv_events.server_events import (
    ServerBlockRemoved,
    ServerBlockStored,
    ServerCacheCleared,
    ServerEvent,
    ServerHash,
)
from halfmoon_servers.kv_events.server_salts import ServerSalts

#: Blocks of one server that are known at most, about 300 bytes each. Removed blocks stay known
#: while there is room, since their children may outlive them.
MAX_KNOWN_BLOCKS = 1_000_000
#: Pairs of layer group and medium that one server may name.
MAX_PLACES = 64
#: Kinds of layers that need each block of a prefix.
_WHOLE_PREFIX = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_DEFAULT_MEDIUM = "GPU"


@dataclass(slots=True)
class TranslatorCounts:
    """Blocks that were skipped, by reason."""

    #: The event has another block size than the server's description.
    wrong_block_size: int = 0
    #: The event of the parent was lost, or the parent itself was skipped.
    unknown_parent: int = 0
    #: Computed with an adapter (LoRA).
    adapter: int = 0
    #: With an image, or embeddings instead of tokens.
    multimodal: int = 0
    #: Of layers that don't need the whole prefix, such as those of a sliding window.
    other_layers: int = 0
    #: Numbers of hashes, tokens and keys don't fit each other.
    inconsistent: int = 0
    #: Held blocks that were forgotten for lack of room.
    forgotten: int = 0


@dataclass(slots=True)
class _HeldBlock:
    block: BlockHash
    #: One bit for each place that has the block; never 0.
    places: int


class BlockTranslator:
    """The blocks of one server (one data-parallel rank), with Halfmoon's hashes."""

    def __init__(
        self,
        model: str,
        block_size: int,
        salts: ServerSalts,
        max_blocks: int = MAX_KNOWN_BLOCKS,
    ) -> None:
        """Translate for the model with this fingerprint.

        Raises:
            ProtocolError: a block size that Halfmoon does not allow.
        """
        self._model = model
        self.block_size = check_block_size(block_size)
        self._salts = salts
        self._max_blocks = max_blocks
        #: What the server has, least recently stored first. Never more than `_max_blocks`, together
        #: with `_removed`.
        self._held: OrderedDict[ServerHash, _HeldBlock] = OrderedDict()
        #: What it had, oldest first; disjoint from `_held`.
        self._removed: OrderedDict[ServerHash, BlockHash] = OrderedDict()
        self._bits: dict[tuple[int, str], int] = {}
        self._other_groups: set[int] = set()
        self.counts = TranslatorCounts()

    def translate(self, events: Iterable[ServerEvent]) -> tuple[KvEvent, ...]:
        """Apply events in their order, and return what they change."""
        changes: list[KvEvent] = []
        for event in events:
            match event:
                case ServerBlockStored():
                    changes += self._on_stored(event)
                case ServerBlockRemoved():
                    changes += self._on_removed(event)
                case ServerCacheCleared():
                    changes += self.clear()
        return tuple(changes)

    def clear(self) -> tuple[KvEvent, ...]:
        """Forget all blocks: the cache was cleared, or the server restarted."""
        self._held.clear()
        self._removed.clear()
        return (AllBlocksCleared(),)

    def held(self) -> Iterator[BlockHash]:
        """Yield the hashes of all blocks that the server has."""
        return (held.block for held in self._held.values())

    def check(self) -> None:
        """Check the bounds, and that each block is held at a place or removed."""
        assert len(self._held) + len(self._removed) <= self._max_blocks
        assert self._held.keys().isdisjoint(self._removed)
        assert all(held.places for held in self._held.values())
        assert len(self._bits) <= MAX_PLACES

    def _on_stored(self, event: ServerBlockStored) -> list[KvEvent]:
        n_blocks = len(event.block_hashes)
        place = self._place(event.group_idx, event.medium)
        if event.lora_id is not None or event.lora_name is not None:
            self.counts.adapter += n_blocks
        elif place is None or not self._needs_whole_prefix(event):
            self.counts.other_layers += n_blocks
        elif not event.token_ids:
            return self._hold(event, self._known_hashes(event), place)
        elif event.block_size != self.block_size:
            self.counts.wrong_block_size += n_blocks
        elif len(event.token_ids) != n_blocks * self.block_size:
            self.counts.inconsistent += n_blocks
        else:
            return self._hold(event, self._new_hashes(event), place)
        return []

    def _needs_whole_prefix(self, event: ServerBlockStored) -> bool:
        """Return False for layers that keep only some blocks of a prefix.

        vLLM names the kind of layers in few events. But only such layers leave blocks out, so that
        tokens of an event are more than its blocks have.
        """
        group = event.group_idx or 0
        n_tokens = len(event.block_hashes) * event.block_size
        if event.kv_cache_spec_kind not in _WHOLE_PREFIX or len(event.token_ids) > n_tokens > 0:
            if len(self._other_groups) < MAX_PLACES:
                self._other_groups.add(group)
            return False
        return group not in self._other_groups

    def _known_hashes(self, event: ServerBlockStored) -> list[tuple[ServerHash, BlockHash]]:
        """Return the known blocks of an event without tokens: they moved to another medium."""
        found = [
            (named, block)
            for named in event.block_hashes
            if (block := self._known(named)) is not None
        ]
        self.counts.unknown_parent += len(event.block_hashes) - len(found)
        return found

    def _new_hashes(self, event: ServerBlockStored) -> list[tuple[ServerHash, BlockHash]]:
        """Return the blocks with Halfmoon's hashes, up to the first one that has none."""
        salt, n_plain = _salt_and_plain_blocks(event)
        n_blocks = len(event.block_hashes)
        self.counts.multimodal += n_blocks - n_plain
        if event.parent_block_hash is None:
            parent = root_hash(
                model=self._model, salt=self._salts.our_salt(salt), block_size=self.block_size
            )
        elif (known := self._known(event.parent_block_hash)) is not None:
            parent = known
        else:
            self.counts.unknown_parent += n_plain
            return []
        tokens = event.token_ids[: n_plain * self.block_size]
        ours = child_hashes(parent, tokens, block_size=self.block_size)
        return list(zip(event.block_hashes, ours, strict=False))

    def _hold(
        self,
        event: ServerBlockStored,
        blocks: list[tuple[ServerHash, BlockHash]],
        place: int,
    ) -> list[KvEvent]:
        """Mark blocks as held at a place; report those that no other place has."""
        new: list[BlockHash] = []
        for named, block in blocks:
            held = self._held.get(named)
            if held is None:
                self._removed.pop(named, None)
                self._held[named] = _HeldBlock(block, place)
                new.append(block)
            else:
                held.places |= place
                self._held.move_to_end(named)
        changes: list[KvEvent] = []
        if new:
            changes.append(
                BlockStored(
                    block_hashes=tuple(new),
                    parent_block_hash=None,
                    token_ids=(),
                    block_size=self.block_size,
                    medium=event.medium,
                )
            )
        if forgotten := self._forget_surplus():
            changes.append(BlockRemoved(block_hashes=tuple(forgotten)))
        return changes

    def _known(self, named: ServerHash) -> BlockHash | None:
        held = self._held.get(named)
        return self._removed.get(named) if held is None else held.block

    def _forget_surplus(self) -> list[BlockHash]:
        """Forget removed blocks, then those stored longest ago; return those that were held."""
        forgotten: list[BlockHash] = []
        while len(self._held) + len(self._removed) > self._max_blocks:
            if self._removed:
                self._removed.popitem(last=False)
            else:
                forgotten.append(self._held.popitem(last=False)[1].block)
        self.counts.forgotten += len(forgotten)
        return forgotten

    def _on_removed(self, event: ServerBlockRemoved) -> list[KvEvent]:
        place = self._place(event.group_idx, event.medium)
        gone: list[BlockHash] = []
        for named in event.block_hashes:
            held = self._held.get(named)
            if held is None or place is None:
                continue
            held.places &= ~place
            if not held.places:
                del self._held[named]
                self._removed[named] = held.block
                gone.append(held.block)
        return [BlockRemoved(block_hashes=tuple(gone), medium=event.medium)] if gone else []

    def _place(self, group: int | None, medium: str | None) -> int | None:
        """Return the bit of a layer group's medium; None: the server names too many."""
        key = (group or 0, medium or _DEFAULT_MEDIUM)
        if key not in self._bits:
            if len(self._bits) == MAX_PLACES:
                return None
            self._bits[key] = 1 << len(self._bits)
        return self._bits[key]


def _salt_and_plain_blocks(event: ServerBlockStored) -> tuple[str, int]:
    """Return the salt of a prompt's first block, and how many blocks are of tokens alone."""
    keys = event.extra_keys or ()
    salt = ""
    for index in range(len(event.block_hashes)):
        of_block = keys[index] if index < len(keys) else None
        if not of_block:
            continue
        first = index == 0 and event.parent_block_hash is None
        if first and len(of_block) == 1 and isinstance(of_block[0], str):
            salt = of_block[0]
            continue
        return salt, index
    return salt, len(event.block_hashes)
