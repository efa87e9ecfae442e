import asyncio
import gc

from halfmoon_runtime.keyed_locks import KeyedLocks


async def test_a_key_is_locked_for_one_at_a_time_and_other_keys_are_free() -> None:
    locks: KeyedLocks[str] = KeyedLocks()
    order: list[str] = []
    inside, gate = asyncio.Event(), asyncio.Event()

    async def use(key: str, name: str) -> None:
        async with locks.lock(key):
            order.append(f"{name} in")
            if name == "first":
                inside.set()
                await gate.wait()
            order.append(f"{name} out")

    first = asyncio.create_task(use("a", "first"))
    await inside.wait()
    second = asyncio.create_task(use("a", "second"))
    await use("b", "other")
    assert order == ["first in", "other in", "other out"]
    gate.set()
    await asyncio.gather(first, second)
    assert order[3:] == ["first out", "second in", "second out"]


async def test_a_key_that_is_not_used_any_more_takes_no_memory() -> None:
    locks: KeyedLocks[int] = KeyedLocks()
    for key in range(100):
        async with locks.lock(key):
            assert len(locks) == 1
    gc.collect()
    assert len(locks) == 0
