"""The pace of housekeeping."""

import asyncio
from math import inf

from halfmoon_runtime.worker.housekeeping import HousekeepingPace


async def test_an_idle_worker_is_woken_by_a_request() -> None:
    pace = HousekeepingPace(idle_s=inf)
    waiting = asyncio.create_task(pace.wait(idle=True))
    await asyncio.sleep(0)
    assert not waiting.done()
    pace.wake()
    await waiting


async def test_a_request_of_an_earlier_round_wakes_nothing() -> None:
    pace = HousekeepingPace(busy_s=0.0, idle_s=inf)
    pace.wake()
    await pace.wait(idle=False)
    waiting = asyncio.create_task(pace.wait(idle=True))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    pace.wake()
    await waiting


async def test_time_alone_wakes_both_an_idle_worker_and_a_busy_one() -> None:
    await HousekeepingPace(busy_s=inf, idle_s=0.0).wait(idle=True)
    await HousekeepingPace(busy_s=0.0, idle_s=inf).wait(idle=False)
