"""Operate as a soak's clients: put, get, copy, drop and pin prompts, and disconnect abruptly."""

import asyncio
import random

from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.messages import DropBlocks
from halfmoon_testing.kvstore_soak.harness import (
    EXPECTED_ERRORS,
    N_COMMON,
    N_OWN,
    N_PROMPTS,
    SoakHarness,
    block,
)


class SoakWorker:
    """Run random operations as one client of all nodes."""

    def __init__(self, harness: SoakHarness, randomness: random.Random) -> None:
        self._harness = harness
        self._random = randomness

    async def preload(self) -> None:
        """Put half of the prompts at two nodes each, before the first fault."""
        names = self._harness.pool.names
        for number in range(0, N_PROMPTS, 2):
            for i in (number // 2, number // 2 + 1):
                await self._put("preload", names[i % len(names)], self._harness.prompts[number])

    async def run(self) -> None:
        """Run operations until their target number is done."""
        randomness = self._random
        operations = {
            "put": (35, self._put), "get": (35, self._get), "copy": (14, self._copy),
            "drop": (4, self._drop), "leave": (4, self._leave), "promise": (4, self._promise),
            "hang_up": (4, self._hang_up), "pin": (4, self._pin),
        }  # fmt: skip
        names = list(operations)
        weights = [weight for weight, _ in operations.values()]
        client_name = f"worker-{randomness.randrange(1 << 32)}"
        while self._harness.n_done < self._harness.n_operations:
            [operation] = randomness.choices(names, weights)
            node = randomness.choice(self._harness.pool.names)
            number = randomness.randrange(N_PROMPTS)
            n_blocks = randomness.randrange(1, N_COMMON + N_OWN + 1)
            async with self._harness.prompt_locks[number]:
                what = f"{operation} {n_blocks} blocks of prompt {number} at {node}"
                try:
                    self._harness.note(f"{what} …")
                    await operations[operation][1](
                        client_name, node, self._harness.prompts[number][:n_blocks]
                    )
                except EXPECTED_ERRORS as error:
                    self._harness.note(f"{what}: {error!r}")
                    await self._harness.connections.hang_up(client_name, node)
                    self._harness.n_failed += 1
                    await asyncio.sleep(0.05)
                else:
                    self._harness.note(f"{what}: done")
                    self._harness.done[operation] += 1

    async def _put(self, client_name: str, node: str, hashes: list[BlockHash]) -> None:
        client = await self._harness.connections.client_for(client_name, node)
        epoch = self._harness.model.epoch(node)
        await client.put(hashes, n_tries=200)
        self._harness.model.on_stored(node, hashes, epoch)

    async def _get(self, client_name: str, node: str, hashes: list[BlockHash]) -> None:
        client = await self._harness.connections.client_for(client_name, node)
        await self._harness.read(client, node, hashes)

    async def _copy(self, client_name: str, node: str, hashes: list[BlockHash]) -> None:
        sources = [n for n in self._harness.model.holders(hashes[0]) if n != node]
        if not sources:
            return
        source = await self._harness.connections.read_record(sources[0])
        client = await self._harness.connections.client_for(client_name, node)
        epoch = self._harness.model.epoch(node)
        try:
            n_blocks = await client.copy(source, hashes)
        except ValueError:
            return  # the node is busy or full, or the source is not healthy
        self._harness.model.on_stored(node, hashes[:n_blocks], epoch)

    async def _drop(self, client_name: str, node: str, hashes: list[BlockHash]) -> None:
        """Drop the last blocks of a prompt, but no shared ones."""
        number = int.from_bytes(hashes[-1][:8], "big") - 100
        gone = (
            self._harness.prompts[number][max(N_COMMON, len(hashes) - 4) :] if number >= 0 else []
        )
        if not gone:
            return
        self._harness.model.on_dropped(node, gone)
        client = await self._harness.connections.client_for(client_name, node)
        await client.send(DropBlocks(hashes=tuple(reversed(gone))))
        await client.stored()  # then it has processed the message

    async def _leave(self, client_name: str, node: str, hashes: list[BlockHash]) -> None:
        await (await self._harness.connections.client_for(client_name, node)).abandon_lease(
            hashes[:4]
        )

    async def _promise(self, client_name: str, node: str, hashes: list[BlockHash]) -> None:
        client = await self._harness.connections.client_for(client_name, node)
        await client.abandon_reservation(
            [block(1000 + hash(hashes[-1]) % 1000, i) for i in range(4)]
        )

    async def _pin(self, client_name: str, node: str, hashes: list[BlockHash]) -> None:
        """Pin a block for some seconds, and never remove the pin."""
        kind, ttl_s = self._random.choice(("soft", "hard")), self._random.uniform(0.5, 5.0)
        pinned = await asyncio.to_thread(self._harness.pool.pin, node, hashes[-1], kind, ttl_s)
        self._harness.n_pinned += pinned

    async def _hang_up(self, client_name: str, node: str, hashes: list[BlockHash]) -> None:
        """Disconnect abruptly while holding a lease and a reservation."""
        await self._leave(client_name, node, hashes)
        await self._promise(client_name, node, hashes)
        await self._harness.connections.hang_up(client_name, node)
