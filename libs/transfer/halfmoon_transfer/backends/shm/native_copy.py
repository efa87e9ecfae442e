"""Copy a batch in one call of the extension in C, and compare it in another, where that is built.

It leaves whatever is unusual to `shm_backend`: slices out of bounds, stopped transfers. See
`docs/transfer/native.md`.
"""

from collections.abc import Callable, Sequence

from halfmoon_transfer.backends.backend_interface import CarryRequest, refusal_outcome
from halfmoon_transfer.planning.transfer_plan import APPLIED, SliceOutcome
from halfmoon_transfer.regions.access import AccessStatus
from halfmoon_transfer.regions.byte_ops import flip_byte

#: See `halfmoon_transfer_native.copy` and `.differing`.
_Copy = Callable[..., bool]
_Differing = Callable[..., list[int]]


class NativeCopy:
    """The extension's functions."""

    def __init__(self, copy: _Copy, differing: _Differing) -> None:
        self._copy = copy
        self._differing = differing

    def copy_batch(
        self, request: CarryRequest, memory: memoryview
    ) -> Sequence[SliceOutcome] | None:
        """Copy the whole batch between local memory and a mapped region; compare it on request.

        Returns:
            The outcomes of all slices. None if the batch is unusual; then nothing was copied.
        """
        batch = request.batch
        write = batch.op == "write"
        if request.stop.stopped or (write and memory.readonly):
            return None
        if not self._copy(write, batch.slices, request.local, memory):
            return None
        for index, position in request.damage.items():
            local = request.local[index]
            offset = batch.slices[index].remote_offset
            flip_byte(memory[offset : offset + len(local)] if write else local, position)
        outcomes = [APPLIED] * len(batch.slices)
        if request.verify:
            for index in self._differing(batch.slices, request.local, memory):
                outcomes[index] = refusal_outcome(
                    batch, batch.slices[index], AccessStatus.CHECKSUM_MISMATCH, 0
                )
        return outcomes


def find_copy() -> NativeCopy | None:
    """Return the extension's functions; None if there is no extension, or an older one."""
    try:
        from halfmoon_transfer_native import copy, differing
    except ImportError:
        return None
    return NativeCopy(copy, differing)
