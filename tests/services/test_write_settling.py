"""However many writes to one host are given up, one thread waits for its word."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from halfmoon_prefix_cache.write_settling import settle_writes
from halfmoon_protocol.regions import Region
from halfmoon_transfer.interface import Lost


class Transfer:
    """An engine whose owners answer when they may: for the writes that were given up before."""

    def __init__(self) -> None:
        self.given_up: Counter[str] = Counter()
        self.settled: Counter[str] = Counter()
        self.asked: list[str] = []
        self.may_answer = threading.Event()
        self.is_lost = False

    def is_unsettled(self, region: Region) -> bool:
        return self.settled[region.segment] < self.given_up[region.segment]

    def settle(self, region: Region, timeout_s: float) -> None:
        n = self.given_up[region.segment]
        self.asked.append(region.segment)
        assert self.may_answer.wait(20)
        if self.is_lost:
            raise Lost("no answer")
        self.settled[region.segment] = n

    def give_up(self, segment: str) -> asyncio.Task[bool]:
        """Give a write up, and settle it."""
        self.given_up[segment] += 1
        region = Region(segment=segment, generation=1, key=bytes(16), length=64)
        return asyncio.create_task(settle_writes(self, region))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("answers", [True, False])
async def test_one_question_is_under_way_to_each_owner(answers: bool) -> None:
    transfer = Transfer()
    transfer.is_lost = not answers
    waiting = [transfer.give_up("decode-0") for _ in range(30)]
    waiting.append(transfer.give_up("decode-1"))
    await transfer.until(lambda: len(transfer.asked) == 2)
    transfer.may_answer.set()
    assert await asyncio.gather(*waiting) == [answers] * 31
    assert sorted(transfer.asked) == ["decode-0", "decode-1"]


async def test_an_answer_to_an_earlier_question_settles_no_later_write() -> None:
    transfer = Transfer()
    first = transfer.give_up("decode-0")
    await transfer.until(lambda: transfer.asked)
    second = transfer.give_up("decode-0")
    await asyncio.sleep(0)
    transfer.may_answer.set()
    assert await first
    assert await second
    assert transfer.asked == ["decode-0", "decode-0"]


async def test_a_caller_that_gives_up_takes_no_answer_from_the_others() -> None:
    transfer = Transfer()
    first, second = (transfer.give_up("decode-0") for _ in range(2))
    await transfer.until(lambda: transfer.asked)
    first.cancel()
    await asyncio.wait([first])
    transfer.may_answer.set()
    assert await second
    assert transfer.asked == ["decode-0"]
