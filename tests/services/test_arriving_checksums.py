"""Checksums of fetched blocks, computed layer by layer as the reads end."""

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash

from halfmoon_prefix_cache.arriving_checksums import ArrivingChecksums
from halfmoon_prefix_cache.prefix_fetch import LayerFetch
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_transfer.interface import Cancelled, Report

LAYOUT = KvLayout(model="m", n_layers=3, n_kv_heads=2, head_dim=20, dtype="float32", block_size=16)
PAGES = (4, 0, 2)
HERE = Report(1, 0.0, (), 0)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture
def pool() -> bytearray:
    return bytearray(random.Random(5).randbytes(5 * LAYOUT.block_bytes))


def block(page: int) -> slice:
    return slice(page * LAYOUT.block_bytes, (page + 1) * LAYOUT.block_bytes)


class Reads:
    """The reads of all layers, and the checksums that follow them."""

    def __init__(self, pool: bytearray, thread: ThreadPoolExecutor) -> None:
        self.layers = [LayerFetch(lambda: None) for _ in range(LAYOUT.n_layers)]
        self.sums = ArrivingChecksums(memoryview(pool), LAYOUT, PAGES, thread)
        for layer in self.layers:
            layer.add_done_callback(self.sums.on_layer)

    def arrive(self, *layers: int) -> None:
        for layer in layers:
            self.layers[layer].future.set_result(HERE)


async def test_they_are_those_of_the_whole_blocks(
    pool: bytearray, thread: ThreadPoolExecutor
) -> None:
    reads = Reads(pool, thread)
    reads.arrive(0, 1, 2)
    assert await reads.sums == tuple(xxhash.xxh3_64_intdigest(pool[block(page)]) for page in PAGES)


async def test_a_layer_is_read_once_it_is_here_and_not_before(
    pool: bytearray, thread: ThreadPoolExecutor
) -> None:
    reads = Reads(pool, thread)
    reads.arrive(0, 1)
    last = block(PAGES[-1]).stop - 1
    pool[last] ^= 1  # by the read that is under way
    reads.arrive(2)
    assert (await reads.sums)[-1] == xxhash.xxh3_64_intdigest(pool[block(PAGES[-1])])


async def test_layers_are_added_while_others_are_on_their_way(
    pool: bytearray, thread: ThreadPoolExecutor
) -> None:
    reads = Reads(pool, thread)
    expected = tuple(xxhash.xxh3_64_intdigest(pool[block(page)]) for page in PAGES)
    reads.arrive(0, 1)
    await asyncio.wrap_future(thread.submit(lambda: None))  # what was given to it is done
    first = block(PAGES[0]).start
    pool[first] ^= 1
    reads.arrive(2)
    assert await reads.sums == expected  # made of bytes that were read before


async def test_without_one_layer_there_are_none(
    pool: bytearray, thread: ThreadPoolExecutor
) -> None:
    reads = Reads(pool, thread)
    reads.arrive(0)
    reads.layers[1].future.set_exception(Cancelled("not wanted"))
    reads.arrive(2)
    with pytest.raises(Cancelled):
        await reads.sums


async def test_pages_out_of_reach_are_an_error_and_no_checksum(thread: ThreadPoolExecutor) -> None:
    view = memoryview(bytearray(5 * LAYOUT.block_bytes))
    layers = [LayerFetch(lambda: None) for _ in range(LAYOUT.n_layers)]
    sums = ArrivingChecksums(view, LAYOUT, PAGES, thread)
    view.release()
    for layer in layers:
        layer.add_done_callback(sums.on_layer)
        layer.future.set_result(HERE)
    with pytest.raises(ValueError, match="released"):
        await sums
