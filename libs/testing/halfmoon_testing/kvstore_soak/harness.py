"""What all of a soak share: the pool, what it owes, who visits it, and what happened."""

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

#: What an operation may end in when a node is killed, or stands still: nothing is known then.
EXPECTED_ERRORS = (PeerUnreachable, TransferError, KvstoreUnavailable, MetadataError, TimeoutError)
N_PROMPTS, N_COMMON, N_OWN = 48, 8, 24
#: A block that is owed and does not come at once may wait for others to be promoted.
_READ_TRIES = 20
#: What is to come to rest does so within this many seconds.
SETTLE_S = 60.0


class KvstoreProcesses(Protocol):
    """The processes of a soak. Calls block."""

    names: Sequence[str]

    def start(self, name: str) -> None:
        """Start a node, and wait until it is ready."""

    def kill(self, name: str) -> None:
        """`kill -9`, and wait for the end."""

    def pause(self, name: str) -> None:
        """SIGSTOP."""

    def resume(self, name: str) -> None:
        """SIGCONT."""

    def fill_disk(self, name: str) -> None:
        """From now on most writes of a running node to its disk fail."""

    def free_disk(self, name: str) -> None:
        """No more."""

    def disk_is_off(self, name: str) -> bool:
        """Whether a node leaves its disk alone because of failures."""

    def pin(self, name: str, block: BlockHash, kind: str, ttl_s: float) -> bool:
        """Pin a block at a node, softly or hard; whether it did, and was there."""

    def n_pinned(self, name: str) -> int:
        """Blocks under pins at a node."""

    def segment(self, name: str) -> Path:
        """The one file of blocks of a node."""

    def stop_metadata(self) -> None:
        """Kill the metadata server; it forgets everything."""

    def start_metadata(self) -> None:
        """Start it again."""


class PromiseBroken(AssertionError):
    """The pool broke a promise."""


def prompt(number: int) -> list[BlockHash]:
    """The blocks of one prompt; eight different beginnings are shared."""
    common = [block(number % 8, i) for i in range(N_COMMON)]
    return common + [block(100 + number, i) for i in range(N_OWN)]


def block(family: int, index: int) -> BlockHash:
    """One block, by which prompt or beginning it is of."""
    return BlockHash(family.to_bytes(8, "big") + index.to_bytes(8, "big"))


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Look again and again until it holds.

    Raises:
        TimeoutError: it does not, for `SETTLE_S`.
    """
    async with asyncio.timeout(SETTLE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.05)


@dataclass
class SoakHarness:
    """The state of one soak."""

    pool: KvstoreProcesses
    model: KvstoreModel
    connections: SoakConnections
    prompts: list[list[BlockHash]] = field(
        default_factory=lambda: [prompt(number) for number in range(N_PROMPTS)]
    )
    #: Held by whoever does something with a prompt.
    prompt_locks: list[asyncio.Lock] = field(
        default_factory=lambda: [asyncio.Lock() for _ in range(N_PROMPTS)]
    )
    #: Operations that succeeded, by kind, and how many there are to be.
    done: Counter[str] = field(default_factory=Counter)
    n_operations: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    n_failed: int = 0
    n_verified: int = 0
    n_noticed: int = 0
    n_survived: int = 0
    n_compared: int = 0
    n_pinned: int = 0
    #: What happened of late, for whoever wants to know why a promise was broken.
    history: deque[str] = field(default_factory=lambda: deque(maxlen=400))

    @property
    def n_done(self) -> int:
        """Operations that succeeded."""
        return self.done.total()

    def note(self, what: str) -> None:
        """Keep this for the history."""
        self.history.append(f"{self.n_done:5} {what}")

    def broken_promise(self, what: str) -> PromiseBroken:
        """A broken promise, with what led to it."""
        return PromiseBroken("\n".join([what, *self.history, what]))

    async def wait_for_operations(self, n: int) -> None:
        """Wait until so many more are done, or there are no more to do."""
        target = min(self.n_done + n, self.n_operations)
        while True:
            if self.n_done >= target:
                return
            await asyncio.sleep(0.02)

    @asynccontextmanager
    async def lock_all_prompts(self) -> AsyncIterator[None]:
        """While no client does anything."""
        async with AsyncExitStack() as stack:
            for turn in self.prompt_locks:
                await stack.enter_async_context(turn)
            yield

    async def read(self, client: BlockClient, node: str, hashes: list[BlockHash]) -> None:
        """Read a prefix; it must be at least as long as the one that the node owes.

        Raises:
            Wrong: it is not.
            WrongBytes: a block is not what was put, and was not damaged on purpose.
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
            # What it did not owe before or does not owe now need not have been there.
            if len(found) >= min(n_owed, self.model.owes_prefix(node, hashes)):
                return
            await asyncio.sleep(0.05)
        missing = hashes[len(found)]
        there = "is" if missing in await client.stored() else "is not"
        raise self.broken_promise(
            f"{node} owes {n_owed} of {len(hashes)} blocks and serves {len(found)};"
            f" {missing.hex()} {there} in its snapshot"
        )

    async def read_eventually(self, visitor: str, node: str, hashes: list[BlockHash]) -> None:
        """Read a prefix from a node that is there; what it takes may have to come back first."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                try:
                    client = await self.connections.client_for(visitor, node)
                    return await self.read(client, node, hashes)
                except EXPECTED_ERRORS:
                    await self.connections.hang_up(visitor, node)
                    await asyncio.sleep(0.1)
