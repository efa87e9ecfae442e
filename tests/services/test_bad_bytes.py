"""Bytes that are lost, damaged or of another prompt on their way: never a wrong token."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from halfmoon_conductor.errors import GenerationFailed
from halfmoon_engine.fake_engine import FakeEngine, FakeModelSpec
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_transfer.backends.backend_interface import Backend, CarryRequest
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan, FaultyBackend
from halfmoon_transfer.planning.transfer_plan import SliceOutcome
from tests.nightly import by_day
from tests.services.asking import ORACLE, prompt_of

LocalCluster = Callable[..., Any]


@pytest.mark.parametrize("inner", ["memory", "tcp"])
@pytest.mark.parametrize("seed", range(by_day(1, at_night=3)))
async def test_dropped_and_damaged_slices_cost_time_and_no_token(
    local_cluster: LocalCluster, inner: str, seed: int
) -> None:
    faults = FaultInjection(inner, FaultPlan(seed=seed, drop_rate=0.05, corrupt_rate=0.05))
    async with local_cluster(backends=(faults,), chunk_tokens=64) as cluster:
        for n_tokens in (40, 300, 300):
            prompt = prompt_of(n_tokens, salt=seed)
            assert await cluster.generate(prompt, 20) == ORACLE.expected(prompt, 20)
        await cluster.settled()


@pytest.mark.parametrize("inner", ["memory", "shm", "tcp"])
@pytest.mark.parametrize("seed", range(by_day(1, at_night=3)))
async def test_kv_that_is_damaged_on_its_way_to_decode_is_written_again(
    local_cluster: LocalCluster, inner: str, seed: int
) -> None:
    """The faults force no checks here, so bytes are compared only where the worker asks."""
    faults = FaultInjection(inner, FaultPlan(seed=seed, corrupt_rate=0.1, verify=False))
    async with local_cluster(backends=(faults,), chunk_tokens=64, n_kvstore=0) as cluster:
        for salt in range(10):
            prompt = prompt_of(300, salt)
            assert await cluster.generate(prompt, 10) == ORACLE.expected(prompt, 10)
        await cluster.settled()
        stats = cluster.members["prefill-0"].transfer.stats()
        assert stats.corrupted_by_path[f"faults({inner})"] > 0


async def test_kv_that_never_arrives_whole_ends_in_an_error_that_says_so(
    local_cluster: LocalCluster,
) -> None:
    faults = FaultInjection("shm", FaultPlan(corrupt_rate=1.0, verify=False))
    async with local_cluster(backends=(faults,), n_kvstore=0) as cluster:
        with pytest.raises(GenerationFailed, match=r"decode-0: .* checksum does not match"):
            await cluster.generate(prompt_of(100), 10)
        await cluster.settled()


class _FaultsTowardsOne(FaultInjection):
    """Faults of writes to one peer; all others are carried without."""

    def __init__(self, inner: str, plan: FaultPlan, peer: str) -> None:
        super().__init__(inner, plan)
        self.peer = peer

    def wrap(self, inner: Backend) -> Backend:
        return _FaultyTowardsOne(inner, self)


class _FaultyTowardsOne(FaultyBackend):
    def __init__(self, inner: Backend, faults: _FaultsTowardsOne) -> None:
        super().__init__(inner, faults)
        self._peer = faults.peer

    def carry(self, request: CarryRequest) -> Sequence[SliceOutcome]:
        if request.peer.name != self._peer or request.batch.op != "write":
            return self._inner.carry(request)
        return super().carry(request)


async def test_a_decode_to_which_kv_is_damaged_each_time_is_left_for_another(
    local_cluster: LocalCluster,
) -> None:
    faults = _FaultsTowardsOne("shm", FaultPlan(corrupt_rate=1.0, verify=False), "decode-0")
    async with local_cluster(backends=(faults,), n_decode=2, n_kvstore=0) as cluster:
        for salt in range(3):
            prompt = prompt_of(100, salt)
            assert await cluster.generate(prompt, 10) == ORACLE.expected(prompt, 10)
        await cluster.settled()
        stats = cluster.members["prefill-0"].transfer.stats()
        assert stats.corrupted_by_path["faults(shm)"] > 0
        assert stats.n_failures > 0


@pytest.mark.parametrize("n_kvstore", [0, 1])
async def test_what_a_group_writes_over_shared_memory_is_compared(
    local_cluster: LocalCluster, n_kvstore: int
) -> None:
    """Activations, landings, and the further stages' layers of blocks in the kvstore."""
    model = FakeModelSpec(layers=6)
    oracle = FakeEngine(model)
    faults = FaultInjection("shm", FaultPlan(seed=5, corrupt_rate=0.1, verify=False))
    async with local_cluster(
        lambda: FakeEngine(model),
        backends=(faults,),
        n_prefill=2,
        group_size=2,
        n_kvstore=n_kvstore,
        config=SchedulingConfig(group_least_gain=1.0),
    ) as cluster:
        for salt in range(4):
            prompt = prompt_of(600, salt)
            assert await cluster.generate(prompt, 8) == oracle.expected(prompt, 8)
            assert await cluster.generate(prompt, 8) == oracle.expected(prompt, 8)
        await cluster.settled()


async def test_layers_that_a_further_stage_keeps_are_compared(local_cluster: LocalCluster) -> None:
    """Their checksum is made of what arrived in the kvstore, so it would not show the damage."""
    model = FakeModelSpec(layers=6)
    oracle = FakeEngine(model)
    plan = FaultPlan(seed=2, corrupt_rate=0.02, verify=False)
    async with local_cluster(
        lambda: FakeEngine(model),
        backends=(_FaultsTowardsOne("shm", plan, "kvstore-0"),),
        n_prefill=2,
        group_size=2,
        config=SchedulingConfig(group_least_gain=1.0),
    ) as cluster:
        n_cached = 0
        for salt in range(12):
            prompt = prompt_of(600, salt)
            assert await cluster.generate(prompt, 8) == oracle.expected(prompt, 8)
            await cluster.settled()
            events = [event async for event in cluster.events(prompt, 8)]
            assert [event.token for event in events] == oracle.expected(prompt, 8)
            n_cached += events[0].n_cached
            await cluster.settled()
        assert n_cached > 0


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
