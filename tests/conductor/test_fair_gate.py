"""Tenants take turns at a gate, and no place is lost."""

import asyncio
import random

from halfmoon_conductor.fair_gate import FairGate


async def test_another_tenant_waits_for_no_more_than_what_is_inside() -> None:
    gate, order = FairGate(1, credit=10), list[str]()
    may_leave = asyncio.Event()

    async def work(tenant: str) -> None:
        async with gate.place(tenant, 1):
            await may_leave.wait()
            order.append(tenant)

    tasks = [asyncio.create_task(work("flood")) for _ in range(20)]
    await asyncio.sleep(0)  # one of them is inside
    tasks.append(asyncio.create_task(work("honest")))
    await asyncio.sleep(0)
    may_leave.set()
    await asyncio.gather(*tasks)
    assert order.index("honest") <= 2


async def test_waiters_that_are_cancelled_at_any_moment_lose_no_place() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    gate, n_inside, most = FairGate(3, credit=10), 0, 0

    async def work(tenant: str) -> None:
        nonlocal n_inside, most
        async with gate.place(tenant, dice.randint(1, 9)):
            n_inside += 1
            most = max(most, n_inside)
            try:
                for _ in range(dice.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                n_inside -= 1

    tasks = list[asyncio.Task[None]]()
    for _ in range(500):
        tasks.append(asyncio.create_task(work(dice.choice("abc"))))
        if dice.random() < 0.4:
            dice.choice(tasks).cancel()
        if dice.random() < 0.5:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (most, n_inside, gate._n_free, gate._waiting) == (3, 0, 3, [])
