"""Start a target of `halfmoon transfer bench` as a process of this machine.

Run as a program, this module opens an engine, allocates one region, and prints one line of JSON.
The line has record and region, so that the processes need no metadata server. The program ends
with its input.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from halfmoon_metadata import MetadataStore
from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_protocol.regions import Region
from halfmoon_transfer import TransferEngine
from halfmoon_transfer.metadata import descriptor as records
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor

_NAME = "bench-target"


class TargetProcess(msgspec.Struct, frozen=True):
    """A running target: its process id and the region to read and write."""

    pid: int
    region: Region


class _Introduction(msgspec.Struct, frozen=True):
    """The line that the process prints."""

    descriptor: SegmentDescriptor
    region: Region


@contextmanager
def run_target(store: MetadataStore, *, backend: str, n_bytes: int) -> Iterator[TargetProcess]:
    """Run a target while the block runs, and write its record into this process's store.

    Raises:
        RuntimeError: the process ended at once; its message is on standard error.
    """
    with subprocess.Popen(
        [sys.executable, "-m", __name__, backend, str(n_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            if not (line := process.stdout.readline()):
                raise RuntimeError(f"the target process ended with {process.wait()}, see above")
            introduction = msgspec.json.decode(line, type=_Introduction)
            store.put(records.PREFIX + _NAME, records.encode(introduction.descriptor))
            yield TargetProcess(process.pid, introduction.region)
        finally:
            process.kill()


def _serve(backend: str, n_bytes: int) -> None:
    with TransferEngine.open(
        _NAME, metadata=MemoryStore(), generation=1, backends=(backend,)
    ) as engine:
        introduction = _Introduction(engine.descriptor, engine.allocate(n_bytes).region)
        print(msgspec.json.encode(introduction).decode(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
