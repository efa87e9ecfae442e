"""Groups of prefill workers: a long prompt in stages, its cache, its ends, and its refusals."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from halfmoon_engine.fake_engine import FakeEngine, FakeModelSpec
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    Cancel,
    PrefillDone,
    PrefillFailed,
    PrefillStopped,
    ShareEnded,
    Stage,
    StageAddress,
    StartPrefill,
    StartShare,
)
from halfmoon_protocol.regions import Landing, Region
from halfmoon_protocol.sampling import Stopping
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_transfer import Lost
from halfmoon_transfer.engine import TransferEngine
from tests.services.asking import dial, prompt_of, start_prefill

LocalCluster = Callable[..., Any]
MODEL = FakeModelSpec(layers=6)
SLOW = FakeModelSpec(layers=6, step_s=0.03)
ORACLE = FakeEngine(MODEL)
PROMPT = prompt_of(600)
#: A group takes each prompt of more than one chunk.
EAGER = SchedulingConfig(group_least_gain=1.0)


def fake(model: FakeModelSpec = MODEL) -> Callable[[], FakeEngine]:
    return lambda: FakeEngine(model)


def n_shares_done(cluster: Any, name: str) -> int:
    """Prompts of which a worker computed a stage."""
    return int(cluster.worker(name).shell.counts.n_shares)


@pytest.mark.parametrize("size", [2, 3])
async def test_a_long_prompt_is_computed_by_all_stages_cold_and_cached_and_a_short_one_by_none(
    local_cluster: LocalCluster, size: int
) -> None:
    longer = [*PROMPT, *(i % 900 for i in range(400))]
    early = tuple(ORACLE.expected(PROMPT, 1))
    masking = Stopping(max_new_tokens=8, stop_token_ids=early, min_new_tokens=3)
    async with local_cluster(fake(), n_prefill=size, group_size=size, config=EAGER) as cluster:

        def shares() -> list[int]:
            return [n_shares_done(cluster, f"prefill-{i}") for i in range(size)]

        assert await cluster.generate(PROMPT[:50], 8) == ORACLE.expected(PROMPT[:50], 8)
        await cluster.settled()
        assert shares() == [0] * size
        # The last stage masks stop tokens that come too early.
        tokens = await cluster.generate(PROMPT, 8, stopping=masking)
        assert len(tokens) >= 3
        assert tokens == ORACLE.expected(PROMPT, len(tokens), stopping=masking)
        await cluster.settled()
        assert shares() == [1] * size
        # Each stage reads its layers of a cached prefix.
        assert await cluster.n_cached(longer) == len(PROMPT) // 16 * 16
        assert await cluster.generate(longer, 6) == ORACLE.expected(longer, 6)
        await cluster.settled()
        assert min(shares()) >= 2


async def test_prompts_of_the_group_and_of_its_members_run_beside_each_other(
    local_cluster: LocalCluster,
) -> None:
    prompts = [[(i * 7 + k) % 990 for i in range(n)] for k, n in enumerate([600, 40, 500, 30, 700])]
    async with local_cluster(fake(), n_prefill=2, group_size=2, config=EAGER) as cluster:
        answers = await asyncio.gather(*(cluster.generate(prompt, 5) for prompt in prompts))
        assert answers == [ORACLE.expected(prompt, 5) for prompt in prompts]
        await cluster.settled()


@pytest.mark.parametrize("lost", ["prefill-1", "prefill-0"])
async def test_a_member_killed_in_mid_prompt_costs_no_token(
    local_cluster: LocalCluster, lost: str
) -> None:
    async with local_cluster(
        fake(SLOW), n_prefill=3, group_size=3, config=EAGER, n_kvstore=0
    ) as cluster:
        asking = asyncio.create_task(cluster.generate(PROMPT, 4))
        last = cluster.worker("prefill-2")
        await cluster.until(lambda: any(r.flow.position for r in last.machine.requests.values()))
        await cluster.kill(lost)
        assert await asking == ORACLE.expected(PROMPT, 4)
        await cluster.settled()


async def test_a_cancelled_prompt_frees_the_pages_of_all_stages(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(fake(SLOW), n_prefill=2, group_size=2, config=EAGER) as cluster:
        asking = asyncio.create_task(cluster.generate(PROMPT, 4))
        last = cluster.worker("prefill-1")
        await cluster.until(lambda: any(r.flow.position for r in last.machine.requests.values()))
        asking.cancel()
        await asyncio.wait([asking])
        await cluster.settled()
        assert await cluster.generate(PROMPT, 4) == ORACLE.expected(PROMPT, 4)


# -- members with one stage's layers alone ---------------------------------------------------


async def add_parts(cluster: Any, size: int = 2) -> list[str]:
    """Start members of a group that have the layers of their stages alone; return their names."""
    names = [f"part-{index}" for index in range(size)]
    for index, name in enumerate(names):
        stage = f"{index}/{size}"
        await cluster.start_prefill(
            name, group="parts", stage=stage, stage_layers_only=True, group_chunk_tokens=64
        )
    await cluster.until(lambda: [group.name for group in cluster.core.cluster.groups] == ["parts"])
    return names


@pytest.mark.parametrize("size", [2, 3])
async def test_members_with_their_stages_layers_alone_compute_long_prompts_cold_and_cached(
    local_cluster: LocalCluster, size: int
) -> None:
    longer = [*PROMPT, *(i % 900 for i in range(400))]
    async with local_cluster(fake(), config=EAGER) as cluster:
        names = await add_parts(cluster, size)
        engines = [cluster.worker(name).forward.engine for name in names]
        assert [engine.stage.n_layers for engine in engines] == {2: [2, 4], 3: [1, 2, 3]}[size]
        assert await cluster.generate(PROMPT, 8) == ORACLE.expected(PROMPT, 8)
        await cluster.settled()
        assert await cluster.generate(longer, 6) == ORACLE.expected(longer, 6)
        await cluster.settled()
        assert [n_shares_done(cluster, name) for name in names] == [2] * size


async def test_short_prompts_go_past_members_with_one_stages_layers_alone(
    local_cluster: LocalCluster,
) -> None:
    prompts = [[(i * 7 + k) % 990 for i in range(30)] for k in range(8)]
    async with local_cluster(fake(), config=EAGER) as cluster:
        names = await add_parts(cluster)
        answers = await asyncio.gather(*(cluster.generate(prompt, 5) for prompt in prompts))
        assert answers == [ORACLE.expected(prompt, 5) for prompt in prompts]
        await cluster.settled()
        assert all(d.placement.chosen.worker_id == "prefill-0" for d in cluster.core.decisions)
        assert [n_shares_done(cluster, name) for name in names] == [0, 0]


async def test_a_long_prompt_survives_the_loss_of_a_member_with_its_stages_layers_alone(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(fake(SLOW), config=EAGER, n_kvstore=0) as cluster:
        names = await add_parts(cluster)
        asking = asyncio.create_task(cluster.generate(PROMPT, 4))
        last = cluster.worker(names[-1])
        await cluster.until(lambda: any(r.flow.position for r in last.machine.requests.values()))
        await cluster.kill(names[-1])
        assert await asking == ORACLE.expected(PROMPT, 4)
        await cluster.settled()


async def test_a_whole_prompt_at_one_stages_layers_is_refused_by_name(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(fake(), config=EAGER) as cluster:
        names = await add_parts(cluster)
        async with strange(cluster) as at:
            for index, name in enumerate(names):
                failed = await at.ask(name, at.start(), PrefillFailed)
                assert failed.reason == (
                    f"{name} has the layers of stage {index} of 2 alone, and computes prompts of "
                    "group 'parts' only"
                )
                assert (failed.retryable, failed.culprit) == (True, name)


async def test_the_log_names_a_group_without_all_of_its_stages(
    local_cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    async with local_cluster(fake(), config=EAGER) as cluster:
        await cluster.start_prefill("prefill-1", group="parts", stage="0/2")
        await cluster.until(lambda: bool(cluster.core.cluster.group_faults))
        assert await cluster.generate(PROMPT, 4) == ORACLE.expected(PROMPT, 4)
        await cluster.settled()
    said = capsys.readouterr().out
    assert "prefill_group_fault" in said and "no worker is stage 1" in said


# -- refusals --------------------------------------------------------------------------------


class Stranger:
    """Sends a member of a group what no conductor and no stage 0 would."""

    def __init__(self, cluster: Any, transfer: TransferEngine) -> None:
        self.cluster = cluster
        self.layout = ORACLE.layout
        self.region = transfer.allocate(16 * self.layout.block_bytes).region

    def address(self, name: str) -> StageAddress:
        info = self.cluster.worker(name).info
        return StageAddress(info.worker_id, info.generation, info.commands)

    def start(self, *stages: StageAddress) -> StartPrefill:
        landing = Landing(self.region, tuple(range(16)), self.layout)
        return start_prefill("mine", range(200), landing, stages=stages)

    def order(self, **more: Any) -> StartShare:
        start = self.start()
        fields: dict[str, Any] = {
            "stage": Stage("group-0", 1, 2, chunk_tokens=64, first_layer=2, n_layers=4),
            "layout": self.layout,
            "token_ids": start.token_ids,
            "n_prompt": 200,
            "landing": start.landing,
            "landing_expires_s": 60.0,
            "sampling": start.sampling,
        }
        return StartShare(request_id=RequestId("mine"), **(fields | more))

    async def ask(self, worker: str, message: Any, answer: type[Any]) -> Any:
        caller = await dial(self.cluster, worker)
        await caller.send(message)
        (answered,) = await caller.wait_for(answer)
        await caller.send(Cancel(request_id=RequestId("mine")))
        await caller.wait_for(PrefillStopped)
        await caller.close()
        return answered


@asynccontextmanager
async def strange(cluster: Any) -> AsyncIterator[Stranger]:
    """It goes on serving, whatever a stranger says in the block."""
    backends = ("memory",)
    with TransferEngine.open("stranger", metadata=cluster.store, backends=backends) as transfer:
        yield Stranger(cluster, transfer)
        assert await cluster.generate(PROMPT, 4) == ORACLE.expected(PROMPT, 4)
        await cluster.settled()


@pytest.fixture
def group(local_cluster: LocalCluster) -> Any:
    """A group of two, and a stranger."""

    @asynccontextmanager
    async def opened() -> Any:
        async with (
            local_cluster(fake(), n_prefill=2, group_size=2, config=EAGER) as cluster,
            strange(cluster) as stranger,
        ):
            yield stranger

    return opened


async def test_a_group_named_rightly_answers_a_stranger(group: Any) -> None:
    async with group() as at:
        done = await at.ask("prefill-0", at.start(at.address("prefill-1")), PrefillDone)
        assert done.first_token == ORACLE.expected(range(200), 1)[0]


async def test_a_group_with_wrong_stages_is_refused_by_name(group: Any) -> None:
    async with group() as at:
        one, other = at.address("prefill-0"), at.address("prefill-1")
        nowhere = {"commands": "mem://nowhere/1", "worker_id": WorkerId("decode-0")}
        gone = msgspec.structs.replace(other, **nowhere)
        for worker, named, said in (
            ("prefill-0", [one], "prefill-0 can't be two stages of group 'group-0'"),
            ("prefill-0", [other, other], "has 2 stages, 3 were named: each stage must be"),
            ("prefill-1", [one], "is stage 1 of group 'group-0', not stage 0"),
            ("prefill-0", [gone], "stage 1, decode-0"),  # it drops what it is told
        ):
            failed = await at.ask(worker, at.start(*named), PrefillFailed)
            assert said in failed.reason


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"stage": Stage("group-1", 1, 2)}, "has group 'group-0', stage 0 says 'group-1'"),
    ({"stage": Stage("group-0", 0, 2)}, "has index 1, stage 0 says 0"),
    ({"stage": Stage("group-0", 1, 3)}, "has n_stages 2, stage 0 says 3"),
    (
        {"stage": Stage("group-0", 1, 2, first_layer=3, n_layers=3)},
        "has first_layer 2, stage 0 says 3",
    ),
    ({"stage": Stage("group-0", 1, 2)}, "has first_layer 2, stage 0 says 0"),
    ({"layout": FakeEngine(FakeModelSpec(layers=4)).layout}, "n_layers is 6 at prefill-1"),
    ({"token_ids": (5000,)}, "token_ids has token 5000"),
]


async def test_a_share_of_a_contradicting_stage_is_refused_by_name(group: Any) -> None:
    async with group() as at:
        for changed, said in CONTRADICTIONS:
            ended = await at.ask("prefill-1", at.order(**changed), ShareEnded)
            assert said in ended.reason


async def test_a_worker_of_no_group_refuses_shares_and_groups(local_cluster: LocalCluster) -> None:
    async with local_cluster(fake(), n_prefill=2) as cluster, strange(cluster) as at:
        ended = await at.ask("prefill-1", at.order(), ShareEnded)
        assert "prefill-1 is in no group" in ended.reason
        failed = await at.ask("prefill-0", at.start(at.address("prefill-1")), PrefillFailed)
        assert "prefill-0 is in no group" in failed.reason


async def test_a_stage_whose_writes_may_still_land_puts_the_landing_in_doubt(
    local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so to stage 0, which says so to the conductor."""

    def settle(region: Region, timeout_s: float) -> None:
        raise Lost(f"segment {region.segment}: no answer in {timeout_s} s")

    async with local_cluster(fake(SLOW), n_prefill=2, group_size=2, config=EAGER) as cluster:
        with TransferEngine.open(
            "stranger", metadata=cluster.store, backends=("memory",)
        ) as transfer:
            at = Stranger(cluster, transfer)
            further = cluster.members["prefill-1"].transfer
            monkeypatch.setattr(further, "is_unsettled", lambda region: True)
            monkeypatch.setattr(further, "settle", settle)
            start = at.start(at.address("prefill-1"))
            caller = await dial(cluster, "prefill-0")
            await caller.send(msgspec.structs.replace(start, landing_expires_s=3.0))
            await cluster.until(lambda: bool(cluster.worker("prefill-1").jobs))
            await caller.send(Cancel(request_id=RequestId("mine")))
            (stopped,) = await caller.wait_for(PrefillStopped)
            assert stopped.landing_in_doubt
            await caller.close()
