"""Run a P2P client as a process that tests and benchmarks command and kill.

The program's arguments are a segment name, a metadata URL and backends. It answers each line on
its standard input with one line of JSON, and exits at the end of its input:

    publish NAME SIZE     publish one buffer, filled with `segment_process.segment_pattern`
    get NAME              fetch it, compare it with the pattern, and serve it
    list PREFIX           list names
"""

import sys

import msgspec

from halfmoon_metadata import open_store
from halfmoon_testing.processes.child_process import ChildProcess
from halfmoon_testing.processes.segment_process import segment_pattern
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.p2p.object_getter import GetReport
from halfmoon_transfer.p2p.p2p_store import P2PStore
from halfmoon_transfer.regions.byte_ops import checksum


class GetAnswer(msgspec.Struct, frozen=True):
    """The answer to a get."""

    report: GetReport
    #: True if the bytes are those of the pattern.
    right: bool


class P2PProcess(ChildProcess):
    """Control a P2P client's process; a context manager that ends it."""

    def __init__(self, segment: str, metadata_url: str, backends: str = "tcp") -> None:
        """Start the process; it is ready after its first answer."""
        super().__init__(__name__, segment, metadata_url, backends)

    def got(self) -> GetAnswer:
        """Read the answer to a get."""
        return msgspec.json.decode(self.answer(), type=GetAnswer)


def run_p2p_client(segment: str, metadata_url: str, backends: str) -> None:
    """Run the child's program."""
    metadata = open_store(metadata_url)
    with (
        TransferEngine.open(segment, metadata=metadata, backends=backends.split(",")) as engine,
        P2PStore(engine, metadata) as store,
    ):
        for line in sys.stdin:
            print(msgspec.json.encode(_obey(engine, store, line.split())).decode(), flush=True)


def _obey(engine: TransferEngine, store: P2PStore, words: list[str]) -> object:
    match words:
        case ["publish", name, size]:
            memory = engine.allocate(int(size))
            memory.view[:] = segment_pattern(int(size))
            return store.publish(name, [memory]).publication
        case ["get", name]:
            (n_bytes,) = store.lookup(name).sizes
            memory = engine.allocate(n_bytes)
            report = store.get_replica(name, [memory])
            # By checksum: comparing memory views would block peers that read from us.
            right = checksum(memory.view) == checksum(memoryview(segment_pattern(n_bytes)))
            return GetAnswer(report, right)
        case ["list", *prefix]:
            return store.list(*prefix)
        case _:
            return f"unknown command {words}"


if __name__ == "__main__":
    run_p2p_client(*sys.argv[1:])
