"""Share the state of a soak: processes, model, connections, counts and history."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from halfmoon_metadata.store_interface import MetadataError
from halfmoon_protocol.ids import BlockHash
from halfmoon_runtime.channels.network import PeerUnreachable
from halfmoon_runtime.kvstore_clients import KvstoreUnavailable
from halfmoon_testing.block_client import BlockClient, DamagedBytes
from halfmoon_testing.kvstore_soak.connections import SoakConnections
from halfmoon_testing.kvstore_soak.model import KvstoreModel
from halfmoon_transfer.interface import TransferError

#: Errors of operations on a node that is killed or stopped; their effect is unknown.
EXPECTED_ERRORS = (PeerUnreachable, TransferError, KvstoreUnavailable, MetadataError, TimeoutError)
N_PROMPTS, N_COMMON, N_OWN = 48, 8, 24
#: Reads of a block that the node owes: it may wait until other blocks are promoted.
_READ_TRIES = 20
#: Seconds within which the nodes must settle.
SETTLE_S = 60.0


class KvstoreProcesses(Protocol):
    """Start, stop and disturb the processes of a soak. Calls block."""

    names: Sequence[str]

    def start(self, name: str) -> None:
        """Start a node, and wait until it is ready."""

    def kill(self, name: str) -> None:
        """Kill a node with SIGKILL, and wait for its end."""

    def pause(self, name: str) -> None:
        """Stop a node with SIGSTOP."""

    def resume(self, name: str) -> None:
        """Continue a node with SIGCONT."""

    def fill_disk(self, name: str) -> None:
        """Make most writes of a running node to its disk fail from now on."""

    def free_disk(self, name: str) -> None:
        """Let writes of a node to its disk succeed again."""

    def disk_is_off(self, name: str) -> bool:
        """Return whether a node has turned its disk off because of failures."""

    def pin(self, name: str, block: BlockHash, kind: str, ttl_s: float) -> bool:
        """Pin a block at a node, softly or hard; return whether the block is pinned."""

    def n_pinned(self, name: str) -> int:
        """Return the number of pinned blocks at a node."""

    def segment(self, name: str) -> Path:
        """Return the path of a node's only segment file."""

    def stop_metadata(self) -> None:
        """Kill the metadata server, which loses all records."""

    def start_metadata(self) -> None:
        """Start the metadata server again."""


class PromiseBroken(AssertionError):
    """A node broke a promise: it does not serve a block that it owes."""


def prompt(number: int) -> list[BlockHash]:
    """Return the blocks of one prompt, which begins with one of eight shared prefixes."""
    common = [block(number % 8, i) for i in range(N_COMMON)]
    return common + [block(100 + number, i) for i in range(N_OWN)]


def block(family: int, index: int) -> BlockHash:
    """Return a block of a prompt or a shared prefix."""
    return BlockHash(family.to_bytes(8, "big") + index.to_bytes(8, "big"))


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll a condition until it holds.

    Raises:
        TimeoutError: the condition does not hold within `SETTLE_S`.
    """
    async with asyncio.timeout(SETTLE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.05)


@dataclass
class SoakHarness:
    """State of one soak, and operations on it."""

    pool: KvstoreProcesses
    model: KvstoreModel
    connections: SoakConnections
    prompts: list[list[BlockHash]] = field(
        default_factory=lambda: [prompt(number) for number in range(N_PROMPTS)]
    )
    #: One lock per prompt, held during an operation on it.
    prompt_locks: list[asyncio.Lock] = field(
        default_factory=lambda: [asyncio.Lock() for _ in range(N_PROMPTS)]
    )
    #: Operations that succeeded, by kind, and their target number.
    done: Counter[str] = field(default_factory=Counter)
    n_operations: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    n_failed: int = 0
    n_verified: int = 0
    n_noticed: int = 0
    n_survived: int = 0
    n_compared: int = 0
    n_pinned: int = 0
    #: Latest events, to explain a broken promise.
    history: deque[str] = field(default_factory=lambda: deque(maxlen=400))

    @property
    def n_done(self) -> int:
        """Number of operations that succeeded."""
        return self.done.total()

    def note(self, what: str) -> None:
        """Add a line to the history."""
        self.history.append(f"{self.n_done:5} {what}")

    def broken_promise(self, what: str) -> PromiseBroken:
        """Return the error of a broken promise, with the history."""
        return PromiseBroken("\n".join([what, *self.history, what]))

    async def wait_for_operations(self, n: int) -> None:
        """Wait until `n` more operations are done, or all are."""
        target = min(self.n_done + n, self.n_operations)
        while True:
            if self.n_done >= target:
                return
            await asyncio.sleep(0.02)

    @asynccontextmanager
    async def lock_all_prompts(self) -> AsyncIterator[None]:
        """Hold all prompts, so that no client operates meanwhile."""
        async with AsyncExitStack() as stack:
            for turn in self.prompt_locks:
                await stack.enter_async_context(turn)
            yield

    async def read(self, client: BlockClient, node: str, hashes: list[BlockHash]) -> None:
        """Read a prefix, which must be at least as long as the one that the node owes.

        Raises:
            PromiseBroken: the prefix is shorter.
            WrongBytes: a block has wrong bytes, and was not damaged on purpose.
        """
        found: list[BlockHash] = []
        n_owed = 0
        for _ in range(_READ_TRIES):
            n_owed = self.model.owes_prefix(node, hashes)
            try:
                found = await client.get(hashes)
            except DamagedBytes as error:
                if not self.model.may_be_damaged(node, error.block):
                    raise
                self.n_noticed += 1
                hashes = hashes[: hashes.index(error.block)]
                if not hashes:
                    return
                continue
            self.n_verified += len(found)
            # Only blocks owed both before and after the read must have been there.
            if len(found) >= min(n_owed, self.model.owes_prefix(node, hashes)):
                return
            await asyncio.sleep(0.05)
        missing = hashes[len(found)]
        in_snapshot = "is" if missing in await client.stored() else "is not"
        raise self.broken_promise(
            f"{node} owes {n_owed} of {len(hashes)} blocks and serves {len(found)};"
            f" {missing.hex()} {in_snapshot} in its snapshot"
        )

    async def read_eventually(self, client_name: str, node: str, hashes: list[BlockHash]) -> None:
        """Read a prefix from a live node, and retry while its services come back."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                try:
                    client = await self.connections.client_for(client_name, node)
                    return await self.read(client, node, hashes)
                except EXPECTED_ERRORS:
                    await self.connections.hang_up(client_name, node)
                    await asyncio.sleep(0.1)
