"""Give each running request one token at every tick."""

import asyncio
from collections.abc import Awaitable, Callable


async def tick_forever(step_s: float, step: Callable[[], Awaitable[None]]) -> None:
    """Call `step` every `step_s` seconds; a beat that was missed is not made up for."""
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    while True:
        due_s = max(due_s + step_s, loop.time())
        await asyncio.sleep(due_s - loop.time())
        await step()
