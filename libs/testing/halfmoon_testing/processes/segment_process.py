"""Run a segment as a process that tests command and kill.

The program opens a transfer engine, and allocates one region filled with a pattern. It prints one
line of JSON with descriptor and region, so that the two processes need no metadata server. Then it
answers commands on its standard input:

    digest            answer the xxh3-64 of the region's bytes
    unregister        unregister the region
    fill <seed>       fill it with other bytes; answer as to digest
    notification      answer the next message that a peer left, as "sender: text"
    (end of input)    close the engine and exit
"""

import sys

import msgspec
import numpy as np

from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_protocol.regions import Region
from halfmoon_testing.processes.child_process import ChildProcess
from halfmoon_transfer.devices.emulated_device import EmulatedBuffer
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.metadata import descriptor as records
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor
from halfmoon_transfer.regions.byte_ops import checksum
from halfmoon_transfer.regions.region_table import Memory
from halfmoon_transfer.settings import TransferSettings


class SegmentIntroduction(msgspec.Struct, frozen=True):
    """The first line that a segment process prints."""

    descriptor: SegmentDescriptor
    region: Region


class SegmentProcess(ChildProcess):
    """Control a segment's process; a context manager that ends it."""

    def __init__(
        self,
        name: str,
        generation: int,
        backends: str,
        n_bytes: int,
        metadata: MetadataStore,
        settings: TransferSettings | None = None,
        *,
        registered: bool = False,
        on_device: bool = False,
    ) -> None:
        """Start the process, and publish its segment in this process's metadata store.

        With `registered`, its region is in memory that it made itself. With `on_device`, the
        region is in memory of an emulated device.
        """
        given = msgspec.json.encode(settings or TransferSettings()).decode()
        where = "device" if on_device else "registered" if registered else "allocated"
        super().__init__(__name__, name, str(generation), backends, str(n_bytes), given, where)
        introduction = msgspec.json.decode(self.answer(), type=SegmentIntroduction)
        self.region = introduction.region
        metadata.put(records.PREFIX + name, records.encode(introduction.descriptor))


def segment_pattern(n_bytes: int) -> bytes:
    """Return the bytes that fill a segment process's region; each 4-byte word differs."""
    words = np.arange((n_bytes + 3) // 4, dtype="<u4") * np.uint32(2654435761)
    return words.tobytes()[:n_bytes]


def fill_seeded(view: memoryview, seed: int) -> None:
    """Fill memory with bytes that depend on the seed."""
    view[:] = np.random.default_rng(seed).bytes(len(view))


def on_device(engine: TransferEngine, n_bytes: int) -> Memory:
    """Allocate registered memory of an emulated device, with the view that kernels have."""
    buffer = EmulatedBuffer(n_bytes)
    return Memory(engine.register(buffer.span()), buffer.view)


def run_segment(
    name: str, generation: str, backends: str, n_bytes: str, settings: str, where: str
) -> None:
    """Run the child's program."""
    with TransferEngine.open(
        name,
        metadata=MemoryStore(),
        generation=int(generation),
        backends=backends.split(","),
        settings=msgspec.json.decode(settings, type=TransferSettings),
    ) as engine:
        if where == "device":
            memory = on_device(engine, int(n_bytes))
        elif where == "registered":
            view = memoryview(bytearray(int(n_bytes)))
            memory = Memory(engine.register(view), view)
        else:
            memory = engine.allocate(int(n_bytes))
        memory.view[:] = segment_pattern(int(n_bytes))
        introduction = SegmentIntroduction(engine.descriptor, memory.region)
        print(msgspec.json.encode(introduction).decode(), flush=True)
        for line in sys.stdin:
            match line.strip():
                case "digest":
                    print(checksum(memory.view), flush=True)
                case command if command.startswith("fill "):
                    fill_seeded(memory.view, int(command.removeprefix("fill ")))
                    print(checksum(memory.view), flush=True)
                case "unregister":
                    engine.unregister(memory.region)
                    print("done", flush=True)
                case "notification":
                    got = engine.notifications(10.0)
                    said = "none came" if got is None else f"{got.segment}: {got.message.decode()}"
                    print(said, flush=True)
                case command:
                    print(f"unknown command {command}", flush=True)


if __name__ == "__main__":
    run_segment(*sys.argv[1:])
