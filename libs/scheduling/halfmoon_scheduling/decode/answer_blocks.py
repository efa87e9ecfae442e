"""Cut the tokens of a request that decodes into blocks, as their KV is computed.

    prompt                       │ answer
    … full block │ tail          │ first token, …            newest token
                 └──────────── the block that fills up ───────────┘
                   KV computed                            KV not computed yet

A decode step computes the KV of the newest token and then chooses the next one. So a block is
complete, and is never written again, once the token behind its last one has come.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon_protocol.blocks import child_hashes
from halfmoon_protocol.ids import BlockHash


@dataclass(frozen=True, slots=True)
class AnswerBlock:
    """A block whose KV is complete."""

    #: Its place in prompt and answer, from 0.
    index: int
    hash: BlockHash
    #: The block before it; None for the first one of a prompt.
    parent: BlockHash | None
    token_ids: tuple[int, ...]


class AnswerBlocks:
    """Follow one request from its first token on."""

    def __init__(
        self,
        parent: BlockHash,
        tail: Sequence[int],
        first_token: int,
        *,
        n_landed: int,
        block_size: int,
    ) -> None:
        """Start behind the prompt.

        Args:
            parent: hash of the prompt's last full block, or the root of its chain.
            tail: the prompt's tokens behind that block.
            first_token: the answer's first token.
            n_landed: tokens of the prompt.
            block_size: tokens of a block.

        Raises:
            ValueError: the tail is not what the prompt has behind its full blocks.
        """
        if len(tail) != n_landed % block_size:
            raise ValueError(
                f"a tail of {len(tail)} tokens, a prompt of {n_landed} tokens has "
                f"{n_landed % block_size} behind its blocks of {block_size}"
            )
        self._block_size = block_size
        #: The chain so far, and how many blocks it has.
        self._parent = parent
        self._n_blocks = n_landed // block_size
        #: Of the block that fills up: at least one, the newest token last.
        self._tokens = [*tail, first_token]

    def on_token(self, token: int) -> AnswerBlock | None:
        """Take the next token; return the block that the step before it has completed."""
        tokens = self._tokens
        if len(tokens) < self._block_size:
            tokens.append(token)
            return None
        (block_hash,) = child_hashes(self._parent, tokens, block_size=self._block_size)
        index, parent = self._n_blocks, self._parent if self._n_blocks else None
        self._parent, self._n_blocks, self._tokens = block_hash, index + 1, [token]
        return AnswerBlock(index, block_hash, parent, tuple(tokens))
