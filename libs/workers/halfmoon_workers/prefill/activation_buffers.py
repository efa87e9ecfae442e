"""Hold the activations of one prompt at one stage: slots to receive chunks in, and to send from.

Each share has regions of its own, unregistered at its end. So a write of the stage before that
comes late, after a failure, is refused or reaches memory that nothing reads. It never reaches the
chunk of another prompt.
"""

from halfmoon_protocol.messages import ActivationSlots
from halfmoon_scheduling.prefill.chunk_flow import SLOTS_PER_SHARE
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import Piece
from halfmoon_transfer.regions.region_table import Memory


class ActivationBuffers:
    """Slots of a share for one direction."""

    def __init__(self, transfer: TransferEngine, chunk_tokens: int, token_bytes: int) -> None:
        """Allocate and register the slots; blocks.

        Args:
            transfer: registers them.
            chunk_tokens: tokens of a chunk at the most.
            token_bytes: bytes of one token's activations.

        Raises:
            OSError: the system has no more memory.
        """
        self._transfer = transfer
        self._token_bytes = token_bytes
        self._slot_bytes = chunk_tokens * token_bytes
        self._memory: Memory | None = transfer.allocate(SLOTS_PER_SHARE * self._slot_bytes)

    @property
    def slots(self) -> ActivationSlots:
        """The slots as the stage before reaches them."""
        offsets = tuple(slot * self._slot_bytes for slot in range(SLOTS_PER_SHARE))
        return ActivationSlots(self._open.region, offsets, self._slot_bytes, self._token_bytes)

    def view(self, slot: int, n_tokens: int) -> memoryview:
        """Return the bytes of a chunk of so many tokens in a slot."""
        start = slot * self._slot_bytes
        return self._open.view[start : start + n_tokens * self._token_bytes]

    def send_pieces(self, slot: int, n_tokens: int, to: ActivationSlots) -> list[Piece]:
        """List the write of a chunk to the slot of the next stage with the same number."""
        n_bytes = n_tokens * self._token_bytes
        start = slot * self._slot_bytes
        return [Piece(self._open.region, start, to.region, to.offsets[slot], n_bytes)]

    def close(self) -> None:
        """Unregister the slots; no forward pass and no transfer of ours uses them."""
        if self._memory is not None:
            self._transfer.unregister(self._memory.region)
            self._memory = None

    @property
    def _open(self) -> Memory:
        assert self._memory is not None, "these slots are closed"
        return self._memory
