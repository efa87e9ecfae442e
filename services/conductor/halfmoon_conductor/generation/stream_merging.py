"""Merge several generators into one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


class _Over:
    """Marks in the queue that one source has ended."""


async def merge_streams(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield items as they arrive, in order within each source.

    One task advances and closes each source. Closing this generator closes all sources. An error of
    one source is raised here, and ends the others.
    """
    # One slot for each source: no source runs ahead of the reader.
    items: asyncio.Queue[T | _Over | Exception] = asyncio.Queue(len(sources))

    async def read(source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source) as each:
                async for item in each:
                    await items.put(item)
            await items.put(_Over())
        except Exception as error:
            await items.put(error)

    tasks: list[asyncio.Task[None]] = []
    try:
        for source in sources:
            # Sources start one after the other, and other tasks run in between: each first step may
            # take milliseconds.
            tasks.append(asyncio.create_task(read(source)))
            await asyncio.sleep(0)
        n_left = len(tasks)
        while n_left:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, _Over):
                n_left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
