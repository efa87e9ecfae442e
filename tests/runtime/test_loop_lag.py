"""That an event loop was kept from its work shows."""

import asyncio
import time

from halfmoon_runtime.observability.loop_lag import LoopLagMonitor


async def test_a_loop_that_was_blocked_was_late_by_as_much_and_if_each_time_is_behind() -> None:
    lag = LoopLagMonitor()
    watching = asyncio.create_task(lag.watch())
    await asyncio.sleep(0)
    time.sleep(0.6)  # noqa: ASYNC251 -- what must not be done, done
    while not lag.lag_s.n:
        await asyncio.sleep(0.01)
    assert lag.lag_s.sum > 0.2
    assert lag.late_s > 0.2
    assert lag.behind_s == 0.0, "one pause is no overload"
    while lag.behind_s <= 0.05:
        await asyncio.sleep(0)
        time.sleep(0.4)  # noqa: ASYNC251 -- no wait: it blocks the loop, again and again
    watching.cancel()
