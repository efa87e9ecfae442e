"""Inject faults into a soak's nodes, one after the other; each is healed before the next."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from halfmoon_protocol.ids import BlockHash
from halfmoon_testing.block_client import DamagedBytes
from halfmoon_testing.kvstore_soak.harness import (
    EXPECTED_ERRORS,
    N_PROMPTS,
    SoakHarness,
    wait_until,
)
from halfmoon_testing.kvstore_soak.segment_damage import flip_bits, read_slot_headers, tear_header


class NodeFaultInjector:
    """Choose faults at random and inject them."""

    def __init__(self, harness: SoakHarness, random_source: random.Random, *, kills: bool) -> None:
        self._harness = harness
        self._random = random_source
        self._kills = kills

    async def next(self) -> None:
        """Inject one fault, and return when it is healed."""
        random_source = self._random
        kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "kill": (6, self._kill), "kill_two": (2, self._kill_two), "pause": (5, self._pause),
            "full_disk": (2, self._full_disk), "damaged_disk": (3, self._damaged_disk),
            "damaged_memory": (3, self._damaged_memory), "no_metadata": (3, self._no_metadata),
            "no_metadata_and_kill": (1, self._no_metadata_and_kill),
        }  # fmt: skip
        if not self._kills:
            kinds = {kind: what for kind, what in kinds.items() if "kill" not in kind}
        # First a kill, then each kind once, then random kinds.
        fresh = [kind for kind in kinds if kind not in self._harness.faults]
        [kind] = random_source.choices(list(kinds), [weight for weight, _ in kinds.values()])
        if fresh:
            kind = "kill" if "kill" in fresh else random_source.choice(fresh)
        self._harness.faults[kind] += 1
        self._harness.note(f"{kind} …")
        await kinds[kind][1]()
        self._harness.note(f"{kind}: healed")

    async def _kill(self) -> None:
        await self._kill_and_restart([self._random.choice(self._harness.pool.names)])

    async def _kill_two(self) -> None:
        await self._kill_and_restart(self._random.sample(list(self._harness.pool.names), 2))

    async def _kill_and_restart(self, names: Sequence[str]) -> None:
        theirs = {block for name in names for block in self._harness.model.owed(name)}
        for name in names:
            self._harness.model.on_down(name, killed=True)
        await asyncio.gather(*(asyncio.to_thread(self._harness.pool.kill, name) for name in names))
        await self._read_elsewhere(names, theirs)
        for name in names:
            await self._restart(name)

    async def _read_elsewhere(self, dead: Sequence[str], theirs: set[BlockHash]) -> None:
        """Check that a live node serves the blocks that it shares with dead nodes."""
        for name in self._harness.pool.names:
            if name in dead or not self._harness.model.is_good(name):
                continue
            for each in self._harness.prompts:
                wanted = each[: self._harness.model.owes_prefix(name, each)]
                if not theirs.isdisjoint(wanted):
                    await self._harness.read_eventually("survivors", name, wanted)
                    self._harness.n_survived += len(theirs & {*wanted})

    async def _restart(self, name: str) -> None:
        """Restart a node, and check that it has the intact blocks of its disk and no others."""
        path = self._harness.pool.segment(name)
        whole = read_slot_headers(path)
        torn = set(self._random.sample(sorted(whole), min(len(whole), 2)))
        self._harness.model.on_dropped(name, torn)
        for block in torn:
            tear_header(path, whole[block].slot)
        await asyncio.to_thread(self._harness.pool.start, name)
        async with self._harness.lock_all_prompts():
            client = await self._harness.connections.client_for("restarts", name, anew=True)
            stored = await client.stored()
            if lost := self._harness.model.must_return(name) - stored:
                n_whole = len(lost & whole.keys())
                raise self._harness.broken_promise(
                    f"{name} had {len(lost)} blocks on its disk that are gone since it was killed;"
                    f" headers of {n_whole} of them were whole"
                )
            if strange := stored - {block for each in self._harness.prompts for block in each}:
                raise self._harness.broken_promise(
                    f"{name} has {len(strange)} blocks that no client put"
                )
            self._harness.model.on_up(name, stored, saved=stored & (whole.keys() - torn))

    async def _pause(self) -> None:
        """Stop a node for a while, sometimes for longer than the heartbeat timeout."""
        name = self._random.choice(self._harness.pool.names)
        self._harness.pool.pause(name)
        await asyncio.sleep(self._random.choice((0.2, 0.5, 1.0, 4.5)))
        self._harness.pool.resume(name)

    async def _full_disk(self) -> None:
        name = self._random.choice(self._harness.pool.names)
        self._harness.model.on_down(name, killed=False)
        self._harness.pool.fill_disk(name)
        await self._harness.wait_for_operations(60)
        self._harness.pool.free_disk(name)

        async def is_on() -> bool:
            return not await asyncio.to_thread(self._harness.pool.disk_is_off, name)

        await wait_until(is_on)
        async with self._harness.lock_all_prompts():
            client = await self._harness.connections.client_for("restarts", name, anew=True)
            self._harness.model.on_up(name, await client.stored())

    async def _damaged_disk(self) -> None:
        """Flip a bit of some blocks on disk, and flip it back where the slot is unchanged."""
        name = self._random.choice(self._harness.pool.names)
        path = self._harness.pool.segment(name)
        async with self._harness.lock_all_prompts():
            there = read_slot_headers(path)
            some = self._random.sample(sorted(there), min(len(there), 8))
            chosen = {block: there[block] for block in some}
            self._harness.model.on_damaged(name, chosen, in_memory=False)
            flip_bits(path, [found.slot for found in chosen.values()])
        for block in chosen:
            await self._harness.read_eventually("damage", name, [block])
        await self._harness.wait_for_operations(80)
        async with self._harness.lock_all_prompts():
            now = read_slot_headers(path)
            flip_bits(
                path, [found.slot for block, found in chosen.items() if now.get(block) == found]
            )
            self._harness.model.on_mended(name, chosen)

    async def _damaged_memory(self) -> None:
        name = self._random.choice(self._harness.pool.names)
        number = self._random.randrange(N_PROMPTS)
        chosen = self._harness.prompts[number][: self._random.randrange(1, 6)]
        async with self._harness.prompt_locks[number]:
            client = await self._harness.connections.client_for("damage", name, anew=True)
            self._harness.model.on_damaged(name, chosen, in_memory=True)
            with suppress(*EXPECTED_ERRORS):
                await client.damage(chosen)
        await self._harness.wait_for_operations(40)

        async def is_mended() -> bool:
            """Return whether each reported block is evicted, or was read from the disk again."""
            try:
                client = await self._harness.connections.client_for("damage", name)
                await client.report_damaged(chosen)
                for block in chosen:
                    await client.get([block])
            except DamagedBytes:
                return False
            except EXPECTED_ERRORS:
                await self._harness.connections.hang_up("damage", name)
                return False
            return True

        await wait_until(is_mended)
        async with self._harness.lock_all_prompts():
            self._harness.model.on_mended(name, chosen)

    async def _no_metadata(self) -> None:
        await asyncio.to_thread(self._harness.pool.stop_metadata)
        await self._harness.wait_for_operations(60)
        await asyncio.to_thread(self._harness.pool.start_metadata)

    async def _no_metadata_and_kill(self) -> None:
        """Restart a node without a metadata server, for which it must wait."""
        name = self._random.choice(self._harness.pool.names)
        await asyncio.to_thread(self._harness.pool.stop_metadata)
        self._harness.model.on_down(name, killed=True)
        await asyncio.to_thread(self._harness.pool.kill, name)
        restarting = asyncio.create_task(self._restart(name))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(self._harness.pool.start_metadata)
        await restarting
