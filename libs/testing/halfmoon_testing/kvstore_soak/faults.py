"""What happens to a soak's nodes: one misfortune after the other, each healed before the next."""

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
    """Chooses and does them."""

    def __init__(self, scene: SoakHarness, dice: random.Random, *, kills: bool) -> None:
        self._scene = scene
        self._dice = dice
        self._kills = kills

    async def next(self) -> None:
        """Let one happen, and return when it is healed."""
        dice = self._dice
        kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "kill": (6, self._kill), "kill_two": (2, self._kill_two), "pause": (5, self._pause),
            "full_disk": (2, self._full_disk), "damaged_disk": (3, self._damaged_disk),
            "damaged_memory": (3, self._damaged_memory), "no_metadata": (3, self._no_metadata),
            "no_metadata_and_kill": (1, self._no_metadata_and_kill),
        }  # fmt: skip
        if not self._kills:
            kinds = {kind: what for kind, what in kinds.items() if "kill" not in kind}
        # One is killed, then each kind happens once, then it is as the dice have it.
        fresh = [kind for kind in kinds if kind not in self._scene.faults]
        [kind] = dice.choices(list(kinds), [weight for weight, _ in kinds.values()])
        if fresh:
            kind = "kill" if "kill" in fresh else dice.choice(fresh)
        self._scene.faults[kind] += 1
        self._scene.note(f"{kind} …")
        await kinds[kind][1]()
        self._scene.note(f"{kind}: healed")

    async def _kill(self) -> None:
        await self._kill_and_restart([self._dice.choice(self._scene.pool.names)])

    async def _kill_two(self) -> None:
        await self._kill_and_restart(self._dice.sample(list(self._scene.pool.names), 2))

    async def _kill_and_restart(self, names: Sequence[str]) -> None:
        theirs = {block for name in names for block in self._scene.model.owed(name)}
        for name in names:
            self._scene.model.on_down(name, killed=True)
        await asyncio.gather(*(asyncio.to_thread(self._scene.pool.kill, name) for name in names))
        await self._read_elsewhere(names, theirs)
        for name in names:
            await self._restart(name)

    async def _read_elsewhere(self, dead: Sequence[str], theirs: set[BlockHash]) -> None:
        """What was committed at dead nodes and at a live one is not lost."""
        for name in self._scene.pool.names:
            if name in dead or not self._scene.model.is_good(name):
                continue
            for each in self._scene.prompts:
                wanted = each[: self._scene.model.owes_prefix(name, each)]
                if not theirs.isdisjoint(wanted):
                    await self._scene.read_eventually("survivors", name, wanted)
                    self._scene.n_survived += len(theirs & {*wanted})

    async def _restart(self, name: str) -> None:
        """What the disk had is back, what was torn is not, and nothing else is there."""
        path = self._scene.pool.segment(name)
        whole = read_slot_headers(path)
        torn = set(self._dice.sample(sorted(whole), min(len(whole), 2)))
        self._scene.model.on_dropped(name, torn)
        for block in torn:
            tear_header(path, whole[block].slot)
        await asyncio.to_thread(self._scene.pool.start, name)
        async with self._scene.lock_all_prompts():
            client = await self._scene.connections.client_for("restarts", name, anew=True)
            stored = await client.stored()
            if lost := self._scene.model.must_return(name) - stored:
                n_whole = len(lost & whole.keys())
                raise self._scene.broken_promise(
                    f"{name} had {len(lost)} blocks on its disk that are gone since it was killed;"
                    f" headers of {n_whole} of them were whole"
                )
            if strange := stored - {block for each in self._scene.prompts for block in each}:
                raise self._scene.broken_promise(
                    f"{name} has {len(strange)} blocks that nobody put"
                )
            self._scene.model.on_up(name, stored, saved=stored & (whole.keys() - torn))

    async def _pause(self) -> None:
        """Sometimes for longer than a silent peer is taken to be there."""
        name = self._dice.choice(self._scene.pool.names)
        self._scene.pool.pause(name)
        await asyncio.sleep(self._dice.choice((0.2, 0.5, 1.0, 4.5)))
        self._scene.pool.resume(name)

    async def _full_disk(self) -> None:
        name = self._dice.choice(self._scene.pool.names)
        self._scene.model.on_down(name, killed=False)
        self._scene.pool.fill_disk(name)
        await self._scene.wait_for_operations(60)
        self._scene.pool.free_disk(name)

        async def is_on() -> bool:
            return not await asyncio.to_thread(self._scene.pool.disk_is_off, name)

        await wait_until(is_on)
        async with self._scene.lock_all_prompts():
            client = await self._scene.connections.client_for("restarts", name, anew=True)
            self._scene.model.on_up(name, await client.stored())

    async def _damaged_disk(self) -> None:
        """One bit each of some blocks; turned back later, where it still is that block's."""
        name = self._dice.choice(self._scene.pool.names)
        path = self._scene.pool.segment(name)
        async with self._scene.lock_all_prompts():
            there = read_slot_headers(path)
            some = self._dice.sample(sorted(there), min(len(there), 8))
            chosen = {block: there[block] for block in some}
            self._scene.model.on_damaged(name, chosen, in_memory=False)
            flip_bits(path, [found.slot for found in chosen.values()])
        for block in chosen:
            await self._scene.read_eventually("damage", name, [block])
        await self._scene.wait_for_operations(80)
        async with self._scene.lock_all_prompts():
            now = read_slot_headers(path)
            flip_bits(
                path, [found.slot for block, found in chosen.items() if now.get(block) == found]
            )
            self._scene.model.on_mended(name, chosen)

    async def _damaged_memory(self) -> None:
        name = self._dice.choice(self._scene.pool.names)
        number = self._dice.randrange(N_PROMPTS)
        chosen = self._scene.prompts[number][: self._dice.randrange(1, 6)]
        async with self._scene.prompt_locks[number]:
            client = await self._scene.connections.client_for("damage", name, anew=True)
            self._scene.model.on_damaged(name, chosen, in_memory=True)
            with suppress(*EXPECTED_ERRORS):
                await client.damage(chosen)
        await self._scene.wait_for_operations(40)

        async def is_mended() -> bool:
            """Said to be damaged, each is given up, or comes from the disk."""
            try:
                client = await self._scene.connections.client_for("damage", name)
                await client.report_damaged(chosen)
                for block in chosen:
                    await client.get([block])
            except DamagedBytes:
                return False
            except EXPECTED_ERRORS:
                await self._scene.connections.hang_up("damage", name)
                return False
            return True

        await wait_until(is_mended)
        async with self._scene.lock_all_prompts():
            self._scene.model.on_mended(name, chosen)

    async def _no_metadata(self) -> None:
        await asyncio.to_thread(self._scene.pool.stop_metadata)
        await self._scene.wait_for_operations(60)
        await asyncio.to_thread(self._scene.pool.start_metadata)

    async def _no_metadata_and_kill(self) -> None:
        """A node that starts without a metadata server waits for it."""
        name = self._dice.choice(self._scene.pool.names)
        await asyncio.to_thread(self._scene.pool.stop_metadata)
        self._scene.model.on_down(name, killed=True)
        await asyncio.to_thread(self._scene.pool.kill, name)
        restarting = asyncio.create_task(self._restart(name))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(self._scene.pool.start_metadata)
        await restarting
