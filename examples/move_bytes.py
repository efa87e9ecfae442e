"""Move bytes between two processes: `python examples/move_bytes.py`.

The child allocates a region and sends a description of it. The parent writes into the region
and reads it back, and the child takes part in neither.
"""

from multiprocessing import get_context
from multiprocessing.connection import Connection

from halfmoon_metadata import MemoryStore
from halfmoon_transfer import Piece, TransferEngine

N_BYTES = 1 << 20


def own_region(pipe: Connection) -> None:
    """Allocate a region, describe it to the parent, and print its bytes at the end."""
    with TransferEngine.open("owner", metadata=MemoryStore()) as engine:
        memory = engine.allocate(N_BYTES)
        pipe.send((engine.descriptor, memory.region))
        pipe.recv()
        print("the owner has", bytes(memory.view[:5]).decode())


if __name__ == "__main__":
    context = get_context("spawn")
    pipe, child_pipe = context.Pipe()
    child = context.Process(target=own_region, args=(child_pipe,))
    child.start()
    with TransferEngine.open("writer", metadata=MemoryStore()) as engine:
        peer, remote = pipe.recv()
        engine.add_peer(peer)
        local = engine.allocate(2 * N_BYTES)
        local.view[:5] = b"hello"
        report = engine.transfer("write", [Piece(local.region, 0, remote, 0, N_BYTES)])
        engine.transfer("read", [Piece(local.region, N_BYTES, remote, 0, N_BYTES)])
        print("read back", bytes(local.view[N_BYTES : N_BYTES + 5]).decode(), "over", *report.path)
    pipe.send("done")
    child.join()
