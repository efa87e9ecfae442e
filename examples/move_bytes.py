"""Move bytes between two processes: `python examples/move_bytes.py`. No server is needed."""

from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection

from halfmoon_transfer import Piece, TransferEngine


def own_region(pipe: Connection) -> None:
    """Allocate memory, say where it is, and print it at the end; the bytes come by themselves."""
    with TransferEngine.open("owner") as engine:
        memory = engine.allocate(1 << 20)
        pipe.send((engine.descriptor, memory.region))
        pipe.recv()
        print("the owner has", bytes(memory.view[:5]).decode())


if __name__ == "__main__":
    pipe, child_pipe = Pipe()
    Process(target=own_region, args=(child_pipe,)).start()
    with TransferEngine.open("writer") as engine:
        peer, remote = pipe.recv()
        engine.add_peer(peer)
        local = engine.allocate(1 << 20)
        local.view[:5] = b"hello"
        report = engine.transfer("write", [Piece(local.region, 0, remote, 0, 1 << 20)])
        local.view[:5] = b"     "
        engine.transfer("read", [Piece(local.region, 0, remote, 0, 1 << 20)])
        print("read back", bytes(local.view[:5]).decode(), "over", *report.path)
        pipe.send("done")
