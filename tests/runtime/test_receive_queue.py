"""What waits to be received: bounded for each caller and for all, in order, and never lost."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from halfmoon_runtime.channels.network import PeerId
from halfmoon_runtime.channels.receive_queue import ReceiveQueue
from halfmoon_runtime.channels.unread_shares import UnreadShares
from tests.runtime.service_parts import is_unreachable


async def test_frames_count_by_their_bytes_until_they_are_read() -> None:
    inbox: ReceiveQueue[int] = ReceiveQueue(10, most_bytes=100)
    assert inbox.try_put(1, 60)
    assert not inbox.try_put(2, 41)
    assert inbox.try_put(3, 40)
    assert await inbox.get() == 1
    assert inbox.try_put(4, 60)
    inbox.close("gone", discard=True)
    await is_unreachable(inbox.get())


async def test_the_end_wakes_all_who_wait() -> None:
    empty: ReceiveQueue[int] = ReceiveQueue(1)
    getting = [asyncio.create_task(empty.get()) for _ in range(3)]
    full: ReceiveQueue[int] = ReceiveQueue(1)
    full.try_put(1)
    await asyncio.sleep(0)
    empty.close("gone")
    full.close("gone", discard=True)
    for task in getting:
        await is_unreachable(task)
    await is_unreachable(full.get())


@given(
    st.lists(st.sampled_from(["put", "get", "cancel get", "turn"]), max_size=60), st.integers(1, 4)
)
def test_whatever_is_cancelled_items_come_once_and_in_order(steps: list[str], limit: int) -> None:
    async def run() -> None:
        inbox: ReceiveQueue[int] = ReceiveQueue(limit)
        getting: list[asyncio.Task[int]] = []
        got: list[int] = []
        added: list[int] = []
        n = 0

        async def get() -> int:
            item = await inbox.get()
            got.append(item)
            return item

        for step in steps:
            if step == "put":
                if inbox.try_put(n):
                    added.append(n)
                n += 1
            elif step == "get":
                getting.append(asyncio.create_task(get()))
            elif step == "cancel get" and getting:
                getting.pop().cancel()
            else:
                await asyncio.sleep(0)
            assert len(inbox) <= limit
        for task in getting:
            task.cancel()
        await asyncio.gather(*getting, return_exceptions=True)
        while len(inbox):
            got.append(await inbox.get())
        assert got == added

    asyncio.run(run())


FLOODING = PeerId(b"f")


def test_a_caller_has_its_share_of_bytes() -> None:
    shares = UnreadShares(10, 100)
    shares.add(FLOODING, 60)
    assert not shares.fits(FLOODING, 41)
    assert shares.fits(FLOODING, 40)
    shares.remove(FLOODING, 60)
    assert shares.fits(FLOODING, 100)
