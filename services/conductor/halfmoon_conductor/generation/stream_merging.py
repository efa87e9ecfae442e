"""Several generators read at once, as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


class _Over:
    """In the queue: one of the sources has ended."""


async def merge_streams(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items as they come, each source's in its order. Each is advanced and closed by one task.

    Whoever stops reading must close this, which closes all sources. What one of them raises
    is raised here, and ends the others.
    """
    # One place for each source: none runs ahead of whoever reads.
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
            # One after the other, with room between them for who else is on the loop: the first
            # step of each may take milliseconds.
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
