"""A real Mooncake Transfer Engine, driven over standard input and output.

Run with the Python of an environment that holds the wheel. Each line of input is a JSON list
[command, argument, …]; each is answered by one line of JSON, on the descriptor named by the
first argument of the program (the engine itself writes logs wherever it likes).
"""

import ctypes
import json
import os
import random
import sys
from typing import Any

from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode  # type: ignore[import-not-found]


class Peer:
    def __init__(self) -> None:
        self.engine = TransferEngine()
        self.buffers: dict[int, Any] = {}

    def initialize(self, host: str, metadata: str) -> list[int]:
        return [self.engine.initialize(host, metadata, "tcp", ""), self.engine.get_rpc_port()]

    def allocate(self, n_bytes: int) -> int:
        buffer = ctypes.create_string_buffer(n_bytes)
        address = ctypes.addressof(buffer)
        self.buffers[address] = buffer
        assert self.engine.register_memory(address, n_bytes) == 0
        return address

    def fill(self, address: int, n_bytes: int, seed: int) -> None:
        ctypes.memmove(address, bytes_of(seed, n_bytes), n_bytes)

    def holds(self, address: int, n_bytes: int, seed: int) -> bool:
        return ctypes.string_at(address, n_bytes) == bytes_of(seed, n_bytes)

    def first_buffer(self, segment: str) -> int:
        return int(self.engine.get_first_buffer_address(segment))

    def write(self, segment: str, local: int, remote: int, n_bytes: int) -> int:
        return int(self.engine.transfer_sync_write(segment, local, remote, n_bytes))

    def read(self, segment: str, local: int, remote: int, n_bytes: int) -> int:
        return int(self.engine.transfer_sync_read(segment, local, remote, n_bytes))

    def batch(self, op: str, segment: str, local: list[int], remote: list[int], n: int) -> int:
        move = getattr(self.engine, f"batch_transfer_sync_{op}")
        return int(move(segment, local, remote, [n] * len(local)))

    def write_and_notify(
        self, segment: str, local: int, remote: int, n_bytes: int, name: str, text: str
    ) -> int:
        notify = TransferNotify(name, text)
        return int(
            self.engine.transfer_sync(segment, local, remote, n_bytes, TransferOpcode.Write, notify)
        )

    def probe(self, segment: str) -> int:
        return int(self.engine.send_probe(segment))

    def notifies(self) -> list[list[str]]:
        return [[each.name, each.msg] for each in self.engine.get_notifies()]


def bytes_of(seed: int, n_bytes: int) -> bytes:
    """The same in both processes."""
    return random.Random(seed).randbytes(n_bytes)


def main(answers: int) -> None:
    peer = Peer()
    with os.fdopen(answers, "w") as out:
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            try:
                answer = {"is": getattr(peer, command)(*arguments)}
            except Exception as error:
                answer = {"error": repr(error)}
            out.write(json.dumps(answer) + "\n")
            out.flush()
    # Leaving without ceremony: the engine's own shutdown takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
