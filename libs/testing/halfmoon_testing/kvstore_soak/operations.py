"""What a soak's clients do: put, get, copy and drop prompts, and leave without a word."""

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
    """One client of all nodes."""

    def __init__(self, scene: SoakHarness, dice: random.Random) -> None:
        self._scene = scene
        self._dice = dice

    async def preload(self) -> None:
        """Put half of the prompts at two nodes each, before anything happens."""
        names = self._scene.pool.names
        for number in range(0, N_PROMPTS, 2):
            for i in (number // 2, number // 2 + 1):
                await self._put("furnisher", names[i % len(names)], self._scene.prompts[number])

    async def run(self) -> None:
        """Operate until there is no more to do."""
        dice = self._dice
        acts = {
            "put": (35, self._put), "get": (35, self._get), "copy": (14, self._copy),
            "drop": (4, self._drop), "leave": (4, self._leave), "promise": (4, self._promise),
            "hang_up": (4, self._hang_up), "pin": (4, self._pin),
        }  # fmt: skip
        names = list(acts)
        weights = [weight for weight, _ in acts.values()]
        visitor = f"worker-{dice.randrange(1 << 32)}"
        while self._scene.n_done < self._scene.n_operations:
            [act] = dice.choices(names, weights)
            node = dice.choice(self._scene.pool.names)
            number = dice.randrange(N_PROMPTS)
            n_blocks = dice.randrange(1, N_COMMON + N_OWN + 1)
            async with self._scene.prompt_locks[number]:
                what = f"{act} {n_blocks} blocks of prompt {number} at {node}"
                try:
                    self._scene.note(f"{what} …")
                    await acts[act][1](visitor, node, self._scene.prompts[number][:n_blocks])
                except EXPECTED_ERRORS as error:
                    self._scene.note(f"{what}: {error!r}")
                    await self._scene.connections.hang_up(visitor, node)
                    self._scene.n_failed += 1
                    await asyncio.sleep(0.05)
                else:
                    self._scene.note(f"{what}: done")
                    self._scene.done[act] += 1

    async def _put(self, visitor: str, node: str, hashes: list[BlockHash]) -> None:
        client = await self._scene.connections.client_for(visitor, node)
        stretch = self._scene.model.epoch(node)
        await client.put(hashes, n_tries=200)
        self._scene.model.on_stored(node, hashes, stretch)

    async def _get(self, visitor: str, node: str, hashes: list[BlockHash]) -> None:
        client = await self._scene.connections.client_for(visitor, node)
        await self._scene.read(client, node, hashes)

    async def _copy(self, visitor: str, node: str, hashes: list[BlockHash]) -> None:
        sources = [n for n in self._scene.model.holders(hashes[0]) if n != node]
        if not sources:
            return
        source = await self._scene.connections.read_record(sources[0])
        client = await self._scene.connections.client_for(visitor, node)
        stretch = self._scene.model.epoch(node)
        try:
            n_blocks = await client.copy(source, hashes)
        except ValueError:
            return  # busy, full, or the source is not well
        self._scene.model.on_stored(node, hashes[:n_blocks], stretch)

    async def _drop(self, visitor: str, node: str, hashes: list[BlockHash]) -> None:
        """The end of a prompt, its own blocks only: others begin with the common ones."""
        number = int.from_bytes(hashes[-1][:8], "big") - 100
        gone = self._scene.prompts[number][max(N_COMMON, len(hashes) - 4) :] if number >= 0 else []
        if not gone:
            return
        self._scene.model.on_dropped(node, gone)
        client = await self._scene.connections.client_for(visitor, node)
        await client.send(DropBlocks(hashes=tuple(reversed(gone))))
        await client.stored()  # so it has taken it in

    async def _leave(self, visitor: str, node: str, hashes: list[BlockHash]) -> None:
        await (await self._scene.connections.client_for(visitor, node)).abandon_lease(hashes[:4])

    async def _promise(self, visitor: str, node: str, hashes: list[BlockHash]) -> None:
        client = await self._scene.connections.client_for(visitor, node)
        await client.abandon_reservation(
            [block(1000 + hash(hashes[-1]) % 1000, i) for i in range(4)]
        )

    async def _pin(self, visitor: str, node: str, hashes: list[BlockHash]) -> None:
        """For some seconds; nobody takes the pin back."""
        kind, ttl_s = self._dice.choice(("soft", "hard")), self._dice.uniform(0.5, 5.0)
        pinned = await asyncio.to_thread(self._scene.pool.pin, node, hashes[-1], kind, ttl_s)
        self._scene.n_pinned += pinned

    async def _hang_up(self, visitor: str, node: str, hashes: list[BlockHash]) -> None:
        """With a lease and a reservation in hand."""
        await self._leave(visitor, node, hashes)
        await self._promise(visitor, node, hashes)
        await self._scene.connections.hang_up(visitor, node)
