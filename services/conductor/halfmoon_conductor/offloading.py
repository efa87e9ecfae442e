"""Where work on a text is done: short texts here and now, long ones in a thread.

A thread costs a fifth of a millisecond and, while the event loop is busy, waits up to 5 ms for
the interpreter's lock: more than tokenising a few pages takes. A book would stop every stream
for as long as it takes.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: About 2,000 tokens, which take the tokenizer two milliseconds.
SHORT_CHARACTERS = 8192


async def unless_short(n_characters: int, work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread unless it is about so few characters.

    Raises:
        Exception: whatever `work` raises.
    """
    return work() if n_characters <= SHORT_CHARACTERS else await asyncio.to_thread(work)
