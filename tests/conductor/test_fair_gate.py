"""Tenants take turns at a gate, and with their tokens while the loop is late."""

import asyncio
import random

from halfmoon_conductor.fair_gate import FairGate
from halfmoon_conductor.generation.token_turns import TokenTurns
from halfmoon_protocol.logprobs import TokenScore


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


CANDIDATES = TokenScore(-0.5, 1, tuple((token, -0.5) for token in range(20)))


async def order_of_tokens(late_s: float) -> list[str]:
    """Return who sent each token: a flood of streams with candidates, and one stream without."""
    turns, order = TokenTurns(lambda: late_s), list[str]()

    async def stream(tenant: str, n_tokens: int, score: TokenScore | None) -> None:
        turns.streams.enter(tenant)
        for _ in range(n_tokens):
            await turns.wait(tenant, score)
            order.append(tenant)
            await asyncio.sleep(0)  # its next token is there at once
        turns.streams.leave(tenant)

    flood = [asyncio.create_task(stream("flood", 10, CANDIDATES)) for _ in range(40)]
    await asyncio.sleep(0)
    honest = asyncio.create_task(stream("honest", 10, None))
    await asyncio.gather(*flood, honest)
    return order


def last_of_honest(order: list[str]) -> int:
    """Return how many tokens had gone when its last one had."""
    return len(order) - order[::-1].index("honest")


async def test_a_tenants_tokens_pass_the_backlog_of_anothers_while_the_loop_is_late() -> None:
    order = await order_of_tokens(late_s=0.2)
    assert last_of_honest(order) <= 120, "80 went before it came, and the flood had credit for 12"
    assert order.count("flood") == 400


async def test_tokens_go_as_they_come_while_the_loop_is_in_time() -> None:
    assert last_of_honest(await order_of_tokens(late_s=0.01)) > 300
