"""The event loop of simulated processes."""

import asyncio
import random

import pytest

from halfmoon_testing.sim_cluster.virtual_loop import LiveLock, VirtualLoop, VirtualProcess


def test_time_passes_only_while_nothing_is_to_do() -> None:
    loop = VirtualLoop(random.Random(1))

    async def wait() -> list[float]:
        times = [loop.time()]
        await asyncio.sleep(3600.0)
        times.append(loop.time())
        await asyncio.sleep(0)
        return [*times, loop.time()]

    assert loop.run_until_complete(wait()) == [0.0, 3600.0, 3600.0]


def test_a_paused_process_goes_on_later_with_all_that_was_due() -> None:
    loop = VirtualLoop(random.Random(1))
    process = VirtualProcess("a")
    seen: list[tuple[str, float]] = []

    async def tick() -> None:
        for name in "xyz":
            await asyncio.sleep(1.0)
            seen.append((name, loop.time()))

    async def run() -> None:
        task = loop.start(process, tick())
        await asyncio.sleep(1.5)
        loop.pause(process)
        await asyncio.sleep(10.0)
        assert seen == [("x", 1.0)]
        loop.resume(process)
        await task

    loop.run_until_complete(run())
    assert seen == [("x", 1.0), ("y", 11.5), ("z", 12.5)]


def test_a_killed_process_runs_nothing_any_more_not_even_its_cleanup() -> None:
    loop = VirtualLoop(random.Random(1))
    process = VirtualProcess("a")
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.to_thread(seen.append, "thread")
            await asyncio.sleep(1.0)
        finally:
            seen.append("cleanup")

    async def run() -> None:
        task = loop.start(process, work())
        await asyncio.sleep(0.5)
        loop.kill(process)
        task.cancel()
        await asyncio.sleep(5.0)

    loop.run_until_complete(run())
    assert seen == ["thread"]


@pytest.mark.random_seeds(3)
def test_processes_take_turns_by_the_seed_and_each_keeps_its_order(seed: int) -> None:
    def order(seed: int) -> list[str]:
        loop = VirtualLoop(random.Random(seed))
        seen: list[str] = []

        async def run() -> None:
            for name in "abc":
                process = VirtualProcess(name)
                for i in range(3):
                    loop.call_soon(seen.append, f"{name}{i}", context=process.context)
            await asyncio.sleep(1.0)

        loop.run_until_complete(run())
        return seen

    seen = order(seed)
    assert seen == order(seed)
    assert all([each for each in seen if each[0] == name] == [f"{name}{i}" for i in range(3)]
               for name in "abc")  # fmt: skip
    assert len({tuple(order(i)) for i in range(20)}) > 1


def test_a_loop_that_polls_without_waiting_is_noticed() -> None:
    loop = VirtualLoop(random.Random(1))

    async def poll() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(LiveLock, match="goes on for ever"):
        loop.run_until_complete(poll())


def test_what_never_comes_is_noticed() -> None:
    loop = VirtualLoop(random.Random(1))

    async def wait() -> None:
        await loop.create_future()

    with pytest.raises(LiveLock, match="nothing is to come"):
        loop.run_until_complete(wait())
