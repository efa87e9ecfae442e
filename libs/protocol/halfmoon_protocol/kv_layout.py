"""Describe how the bytes of one KV block are laid out, on which two workers must agree.

A block is one contiguous run of bytes, little-endian, in this order:

    [layer][key | value][token in block][kv head][head dimension]

One layer of a block is contiguous too: prefill writes it as soon as that layer's attention is done.
A page of a worker's pool holds exactly one block. Keys are stored after rotary embedding.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from halfmoon_protocol.bounds import Name, unit
from halfmoon_protocol.errors import LayoutMismatch

#: One dimension of a block: no size is 0, and the product of all is a number of bytes.
_SIZE = Meta(ge=1, le=2**24)
_Size = Annotated[int, _SIZE, unit("count")]
DType = Literal["float32", "bfloat16", "float16"]
_ITEM_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape and meaning of a KV block. Equal layouts mean interchangeable bytes."""

    #: Fingerprint of config and weights: KV of another model is noise.
    model: Name
    #: Layers whose keys and values a block has.
    n_layers: Annotated[int, _SIZE, unit("layers")]
    #: Heads of keys and values in each layer.
    n_kv_heads: _Size
    #: Numbers in one head's key, and in its value.
    head_dim: _Size
    #: Type of each of these numbers.
    dtype: DType
    #: Tokens per block. Prompts are cut into 16 to 512; a receiver refuses others by name.
    block_size: Annotated[int, _SIZE, unit("tokens")]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.block_bytes // self.block_size

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return 2 * self.block_size * self.n_kv_heads * self.head_dim * _ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, which is one page of a pool."""
        return self.n_layers * self.layer_bytes

    def blocks_for(self, n_tokens: int) -> int:
        """Count the blocks that `n_tokens` tokens occupy; the last one may be partly empty."""
        return -(-n_tokens // self.block_size)

    def require_same(self, other: "KvLayout", ours: str, theirs: str) -> None:
        """Check that `other` means the same bytes.

        Raises:
            LayoutMismatch: naming each differing field with both values.
        """
        if self == other:
            return
        differing = [
            f"{field} is {getattr(self, field)!r} at {ours}, {getattr(other, field)!r} at {theirs}"
            for field in self.__struct_fields__
            if getattr(self, field) != getattr(other, field)
        ]
        if differing:
            raise LayoutMismatch("KV layouts differ: " + "; ".join(differing))
