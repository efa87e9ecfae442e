"""Ours: the first argument is the backend, the second "sums" or "bare", and "native" or "pure"."""

import sys

from measure import ROOM, measure

from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_testing.processes.segment_process import SegmentProcess
from halfmoon_transfer import Piece, TransferEngine, TransferSettings
from halfmoon_transfer.backends.tcp import native

backend, (sums, speed) = sys.argv.pop(1), sys.argv.pop(1).split(",")
if speed == "native" and native.missing:
    sys.exit(f"the extension is not built (`make native`): {native.missing}")
store = MemoryStore()
settings = TransferSettings(checksums=sums == "sums", native=speed == "native")
with (
    TransferEngine.open("here", metadata=store, backends=(backend,), settings=settings) as engine,
    SegmentProcess("there", 1, backend, ROOM, store, settings) as there,
):
    local = engine.allocate(ROOM)
    local.view[:] = bytes(ROOM)
    #: Made once, as the other peers' descriptors are.
    lists: dict[tuple[int, int], list[Piece]] = {}

    def move(op: str, size: int, n_blocks: int) -> None:
        pieces = lists.get((size, n_blocks))
        if pieces is None:
            pieces = lists[size, n_blocks] = [
                Piece(local.region, index * size, there.region, ROOM - (index + 1) * size, size)
                for index in range(n_blocks)
            ]
        engine.transfer("write" if op == "write" else "read", pieces)

    measure(move, [there.pid])
