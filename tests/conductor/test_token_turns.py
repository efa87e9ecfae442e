"""While the loop is late, one tenant's flood of tokens does not make another's wait."""

import asyncio

from halfmoon_conductor.generation.token_turns import TokenTurns
from halfmoon_protocol.logprobs import TokenScore

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


async def test_a_stream_that_ends_while_it_waits_keeps_no_other_waiting() -> None:
    turns, order = TokenTurns(lambda: 0.2), list[str]()
    for tenant in "abc":
        turns.streams.enter(tenant)

    async def token(tenant: str) -> None:
        await turns.wait(tenant, None)
        order.append(tenant)

    tasks = [asyncio.create_task(token(tenant)) for tenant in "abcabc"]
    await asyncio.sleep(0)
    for gone in tasks[1:3]:
        gone.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(order) == ["a", "a", "b", "c"]
