"""Where the time to a first token goes, told by real workers: it is what was slow."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from halfmoon_engine.fake_engine import FakeEngine, FakeModelSpec
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan
from tests.services.asking import GatedEngine, prompt_of

LocalCluster = Callable[..., Any]
PROMPT = prompt_of(200)
SLOW_S = 0.2


async def stages_of_first(cluster: Any, prompt: list[int]) -> dict[str, float]:
    """One request's; they are no more than the time from asking until its first token was read."""
    began = time.monotonic()
    took_s = 0.0
    stages: dict[str, float] | None = None
    async for event in cluster.events(prompt, 2):
        if stages is None:
            took_s = time.monotonic() - began
            stages = event.stages
    assert stages is not None
    assert min(stages.values()) >= 0 and sum(stages.values()) <= took_s
    return stages


async def test_a_slow_forward_is_in_the_prefill_stage(local_cluster: LocalCluster) -> None:
    model = FakeModelSpec(step_s=SLOW_S)
    async with local_cluster(lambda: FakeEngine(model), chunk_tokens=100) as cluster:
        stages = await stages_of_first(cluster, PROMPT)
        assert stages["prefill"] >= 2 * SLOW_S


@pytest.mark.parametrize("cached", [False, True])
async def test_slow_bytes_are_in_the_stages_that_wait_for_them(
    local_cluster: LocalCluster, cached: bool
) -> None:
    slow = FaultInjection("memory", FaultPlan())
    async with local_cluster(backends=(slow,)) as cluster:
        if cached:
            await cluster.generate(PROMPT, 1)
            await cluster.settled()
        slow.plan = FaultPlan(delay_s=SLOW_S)
        stages = await stages_of_first(cluster, PROMPT)
        # The cached layers are waited for in the forward, the new ones when it is over.
        assert (stages["fetch"] >= SLOW_S / 2) == cached
        assert stages["transfer"] >= SLOW_S / 2
        await cluster.settled()


async def test_who_comes_second_waits_in_the_queue(local_cluster: LocalCluster) -> None:
    async with local_cluster(GatedEngine, n_kvstore=0) as cluster:
        prefill = cluster.members["prefill-0"]
        prefill.engine.gate.clear()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stages_of_first(cluster, PROMPT))
            await cluster.until(prefill.engine.inside.is_set)
            second = tasks.create_task(stages_of_first(cluster, PROMPT[1:]))
            await cluster.until(lambda: len(prefill.worker.jobs) == 2)
            await asyncio.sleep(SLOW_S)
            prefill.engine.gate.set()
        assert second.result()["queue"] >= SLOW_S


async def test_workers_show_what_they_did(local_cluster: LocalCluster) -> None:
    async with local_cluster() as cluster:
        for _ in range(2):
            await cluster.generate(PROMPT, 5)
            await cluster.settled()
        prefill = cluster.worker("prefill-0").metrics()
        decode = cluster.worker("decode-0").metrics()
    assert prefill["halfmoon_prefill_tokens_total"][1].values == {
        ("computed",): 200 + 8,
        ("cached",): 192,
    }
    assert prefill["halfmoon_prefill_requests_ended_total"][1].values["done",] == 2
    stages = prefill["halfmoon_prefill_stage_seconds"][1].values
    assert {stage: told.n for (stage,), told in stages.items()} == dict.fromkeys(
        ("queue", "fetch", "compute", "transfer"), 2
    )
    assert decode["halfmoon_decode_tokens_total"][1] == 8
    assert decode["halfmoon_decode_step_seconds"][1].n == 8
    for told in (prefill, decode):
        pages = told["halfmoon_pages"][1].values
        assert (pages["free",], pages["used",]) == (cluster.n_pages, 0)
