"""Prefixes that a kvstore has on its disk alone: the same tokens, and the metrics tell."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.services.asking import ORACLE, prompt_of


async def test_a_prefix_from_the_disk_is_counted_as_such_and_gives_the_same_tokens(
    local_cluster: Callable[..., Any], tmp_path: Path
) -> None:
    prompt = prompt_of(300)
    async with local_cluster(kvstore_mib=1, kvstore_disks=tmp_path) as cluster:
        kvstore, prefill = cluster.worker("kvstore-0"), cluster.worker("prefill-0")

        def n_blocks() -> tuple[int, int]:
            by_tier = prefill.metrics()["halfmoon_prefill_cached_blocks_total"][1].values
            return by_tier["memory",], by_tier["disk",]

        await cluster.generate(prompt, 1)
        await cluster.settled()
        ours = set(kvstore.tiers.memory.hashes())
        n_cached = await cluster.n_cached(prompt)
        in_memory, from_disk = n_blocks()
        assert in_memory * kvstore.info.layout.block_size == n_cached > 0
        assert from_disk == 0
        # Others come until none of it is in memory any more.
        salt = 0
        while ours & set(kvstore.tiers.memory.hashes()):
            salt += 1
            await cluster.generate(prompt_of(300, salt), 1)
            await cluster.settled()
            # A disk that is too slow for what comes is passed over: give it the time.
            await cluster.until(lambda: not kvstore.tiers.n_writing)
        assert ours <= set(kvstore.tiers.hashes())
        events = [event async for event in cluster.events(prompt, 20)]
        assert [event.token for event in events] == ORACLE.expected(prompt, 20)
        assert events[0].n_cached == n_cached
        assert n_blocks() == (in_memory, in_memory)
        await cluster.settled()
