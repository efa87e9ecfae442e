"""Make blocks that no other check uses: tokens, hashes, bytes and checksums."""

import random
from dataclasses import dataclass
from typing import Any

import xxhash

from halfmoon_protocol.blocks import child_hashes, root_hash

#: The layout that the kit puts first where the subject has none: blocks of 2 KiB.
SMALL_LAYOUT: dict[str, Any] = {
    "model": "conform",
    "n_layers": 1,
    "n_kv_heads": 1,
    "head_dim": 16,
    "dtype": "float32",
    "block_size": 16,
}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def block_bytes(layout: dict[str, Any]) -> int:
    """Return the bytes of one block of a layout."""
    item = _ITEM_BYTES[layout["dtype"]]
    per_layer = 2 * layout["block_size"] * layout["n_kv_heads"] * layout["head_dim"] * item
    return int(layout["n_layers"] * per_layer)


@dataclass(frozen=True)
class BlockChain:
    """A run of blocks, each the child of the one before it."""

    layout: dict[str, Any]
    #: Hash of the block before the first; None at the start of a prompt.
    parent: bytes | None
    token_ids: list[int]
    hashes: list[bytes]
    #: The blocks' bytes, one after the other.
    bodies: list[bytes]

    @property
    def checksums(self) -> list[int]:
        """xxh3-64 of each block."""
        return [xxhash.xxh3_64_intdigest(body) for body in self.bodies]

    def first(self, n: int) -> "BlockChain":
        """Return the first `n` blocks."""
        tokens = self.token_ids[: n * self.layout["block_size"]]
        return BlockChain(self.layout, self.parent, tokens, self.hashes[:n], self.bodies[:n])

    def field(self, name: str) -> Any:
        """Return a part by its name in a data case."""
        return getattr(self, name)


def make_chain(
    chance: random.Random, layout: dict[str, Any], n_blocks: int, parent: bytes | None = None
) -> BlockChain:
    """Make blocks of random tokens and bytes."""
    size = layout["block_size"]
    tokens = [chance.randrange(2**32) for _ in range(n_blocks * size)]
    root = root_hash(model=layout["model"], salt="", block_size=size)
    hashes = child_hashes(parent or root, tokens, block_size=size)  # type: ignore[arg-type]
    bodies = [chance.randbytes(block_bytes(layout)) for _ in range(n_blocks)]
    return BlockChain(layout, parent, tokens, [bytes(each) for each in hashes], bodies)
