"""Bytes that are lost, damaged or of another prompt on their way: never a wrong token."""

from collections.abc import Callable
from typing import Any

import pytest

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan

LocalCluster = Callable[..., Any]
ORACLE = FakeEngine()


def prompt_of(n: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt * 131) % 990 for i in range(n)]


@pytest.mark.parametrize("inner", ["memory", "tcp"])
@pytest.mark.parametrize("seed", range(3))
async def test_dropped_and_damaged_slices_cost_time_and_no_token(
    local_cluster: LocalCluster, inner: str, seed: int
) -> None:
    faults = FaultInjection(inner, FaultPlan(seed=seed, drop_rate=0.05, corrupt_rate=0.05))
    async with local_cluster(backends=(faults,), chunk_tokens=64) as cluster:
        for n_tokens in (40, 300, 300):
            prompt = prompt_of(n_tokens, salt=seed)
            assert await cluster.generate(prompt, 20) == ORACLE.expected(prompt, 20)
        await cluster.settled()


@pytest.mark.parametrize("at", [100, -1], ids=["in the first layer", "in the last one"])
async def test_a_block_damaged_in_the_store_is_noticed_and_computed_anew(
    local_cluster: LocalCluster, at: int
) -> None:
    prompt = prompt_of(200)
    async with local_cluster() as cluster:
        await cluster.generate(prompt, 1)
        await cluster.settled()
        kvstore = cluster.worker("kvstore-0")
        memory = cluster.members["kvstore-0"].transfer
        slot = kvstore.tiers.memory.lease(
            "test", "t", list(kvstore.tiers.memory.hashes())[:1], 0.0
        )[0].slot
        kvstore.tiers.memory.release("test", "t")
        view = cluster.memories["kvstore-0"].view
        size = kvstore.info.layout.block_bytes
        view[slot * size + at % size] ^= 1
        assert memory.stats().n_live == 0
        events = [event async for event in cluster.events(prompt, 20)]
        assert [event.token for event in events] == ORACLE.expected(prompt, 20)
        assert events[0].n_cached == 0
        await cluster.settled()


async def test_a_path_to_decode_that_is_cut_fails_over_to_another_decode(
    local_cluster: LocalCluster,
) -> None:
    """The first decode's memory can't be written; the second one's can."""
    prompt = prompt_of(100)
    async with local_cluster(n_decode=2) as cluster:
        cluster.members["decode-0"].transfer.unregister(cluster.memories["decode-0"].region)
        for _ in range(3):
            assert await cluster.generate(prompt, 10) == ORACLE.expected(prompt, 10)
