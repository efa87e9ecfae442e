"""A worker that changes between prefill and decode on a conductor's word, under load."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from halfmoon_engine.fake_engine import FakeEngine, FakeModelSpec
from halfmoon_metadata import open_store
from halfmoon_metadata.store_interface import MetadataError
from halfmoon_protocol.messages import ChangeRole, Role, WorkerInfo
from halfmoon_runtime.channels.dropped_messages import DROPPED_MESSAGES
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.lifecycle import Service
from halfmoon_runtime.membership import GENERATIONS
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.roles.role_settings import FlexibleDecodeSettings
from halfmoon_workers.roles.worker_process import run_worker

ORACLE = FakeEngine()
FLEXIBLE = "decode-9"
_stores = itertools.count()


REFUSED = "halfmoon_role_changes_refused_total"


def n_measured(phase: str) -> float:
    """Changes of which this phase was measured, in the present worker's process."""
    name = "halfmoon_role_change_seconds_count"
    return REGISTRY.get_sample_value(name, {"phase": phase}) or 0.0


def prompt_of(n: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt * 131) % 990 for i in range(n)]


def refusals(logs: list[Any]) -> list[str]:
    return [each["reason"] for each in logs if each["event"] == "role_change_refused"]


class HeldEngine(FakeEngine):
    """Computes nothing until it may."""

    def __init__(self, may_compute: threading.Event) -> None:
        super().__init__()
        self._may_compute = may_compute

    def forward(self, *args: Any, **how: Any) -> Any:
        assert self._may_compute.wait(60)
        return super().forward(*args, **how)


class RecordedService(Service):
    """Keeps the stages that its worker reports."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        super().__init__(tasks)
        self.stages: list[str] = []

    def report_stage(self, stage: str, **fields: object) -> None:
        self.stages.append(stage)
        super().report_stage(stage, **fields)


class RoleCluster:
    """Workers of one role each, and one worker that can change."""

    def __init__(
        self, cluster: Any, service: RecordedService, running: "asyncio.Task[None]"
    ) -> None:
        self.cluster = cluster
        self.service = service
        #: The process's main task.
        self.running = running

    @property
    def info(self) -> WorkerInfo | None:
        info: WorkerInfo | None = self.cluster.core.cluster.get(FLEXIBLE)
        return info

    def tell(self, role: Role, reason: str = "a test") -> None:
        self.cluster.hub.send(FLEXIBLE, ChangeRole(role=role, reason=reason))

    async def until_it_takes(self, role: Role) -> None:
        """Wait until it takes requests in this role."""
        core = self.cluster.core
        await self.cluster.until(
            lambda: FLEXIBLE in {i.worker_id for i in core.cluster.accepting(role)}
        )

    async def change(self, role: Role) -> None:
        self.tell(role)
        await self.until_it_takes(role)

    async def require_tokens(self, n_requests: int = 4, n_new: int = 20) -> None:
        """Generate at once, and compare each answer with the oracle's."""
        prompts = [prompt_of(20 + 30 * i, salt=i) for i in range(n_requests)]
        answers = await asyncio.gather(*(self.cluster.generate(p, n_new) for p in prompts))
        assert answers == [ORACLE.expected(p, n_new) for p in prompts]


@asynccontextmanager
async def open_roles(
    local_cluster: Callable[..., Any],
    *,
    n_decode: int = 1,
    kind: Any = None,
    make_engine: Callable[[], FakeEngine] = FakeEngine,
    **settings: Any,
) -> AsyncIterator[RoleCluster]:
    url = f"memory://role-changes-{next(_stores)}"
    more = {"model": "fake://fake", "role_cooldown_s": 0.0, "roles": "prefill,decode", **settings}
    config = (kind or FlexibleDecodeSettings)(
        worker_id=FLEXIBLE,
        block_size=ORACLE.layout.block_size,
        pool_mib=8,
        metadata=url,
        transfer_backends="memory",
        measure=False,
        **more,
    )
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            local_cluster(
                make_engine, n_decode=n_decode, network=ZmqNetwork(), store=open_store(url)
            )
        )
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        service = RecordedService(tasks)
        running = tasks.create_task(run_worker(config, service, "decode"))
        live = RoleCluster(cluster, service, running)
        await live.until_it_takes("decode")
        yield live
        service.stopping.set()
        await asyncio.wait([running])


async def test_a_worker_changes_both_ways_with_the_model_that_it_has(
    local_cluster: Callable[..., Any],
) -> None:
    """The seconds of each phase are measured and traced."""
    async with open_roles(local_cluster) as live:
        first = live.info
        assert first is not None and first.roles == ("prefill", "decode")
        await live.require_tokens()
        before = {phase: n_measured(phase) for phase in ("drain", "rest", "start")}
        with capture_logs() as logs:
            await live.change("prefill")
            await live.cluster.until(lambda: any(e["event"] == "role_changed" for e in logs))
        (changed,) = [each for each in logs if each["event"] == "role_changed"]
        assert (changed["before"], changed["role"]) == ("decode", "prefill")
        after = {phase: n + 1 for phase, n in before.items()}
        assert {phase: n_measured(phase) for phase in before} == after
        n_refused = REGISTRY.get_sample_value(REFUSED) or 0.0
        live.tell("prefill")  # refused: no phase is counted
        await live.cluster.until(lambda: REGISTRY.get_sample_value(REFUSED) == n_refused + 1)
        assert {phase: n_measured(phase) for phase in before} == after
        second = live.info
        assert second is not None and second.generation > first.generation
        assert second.prefill_cost is not None and first.decode_cost is not None
        await live.require_tokens(n_requests=12)
        chosen = {each.placement.chosen.worker_id for each in live.cluster.core.decisions}
        assert FLEXIBLE in chosen
        # A generation is higher although the metadata server lost its counters.
        live.cluster.store.delete(GENERATIONS + FLEXIBLE)
        await live.change("decode")
        assert live.info is not None and live.info.generation > second.generation
        await live.require_tokens(n_requests=12)
        await live.cluster.settled()
    assert live.service.stages.count("loading") == 1
    assert live.service.stages.count("ready") == 3


async def test_requests_under_way_lose_no_token_whatever_changes(
    local_cluster: Callable[..., Any],
) -> None:
    async with open_roles(local_cluster, drain_s=30.0) as live:
        roles: list[tuple[Role, Role]] = [
            ("prefill", "decode"), ("decode", "prefill"), ("prefill", "decode")
        ]  # fmt: skip
        for role, other in roles:
            load = asyncio.create_task(live.require_tokens(n_requests=12, n_new=60))
            await live.cluster.until(lambda: live.cluster.core.n_requests["decoding"] > 2)
            with capture_logs() as logs:
                for wish in (role, role, other):  # the second and the third change nothing
                    live.tell(wish)
                await live.until_it_takes(role)
            await load
            assert refusals(logs) == [f"the change to {role} is under way"] * 2
        await live.cluster.settled()


async def test_what_is_not_finished_within_the_limit_goes_on_elsewhere(
    local_cluster: Callable[..., Any],
) -> None:
    async with open_roles(
        local_cluster,
        model="fake://fake?step_s=0.01",
        make_engine=lambda: FakeEngine(FakeModelSpec(step_s=0.01)),
        drain_s=0.0,
    ) as live:
        decodes = live.cluster.core.cluster.decodes
        load = asyncio.create_task(live.require_tokens(n_requests=12, n_new=150))
        await live.cluster.until(lambda: len(decodes.requests(FLEXIBLE)) > 2)
        with capture_logs() as logs:
            await live.change("prefill")
            await load
        assert [each for each in logs if each["event"] == "request_retried"]
        await live.cluster.settled()


async def test_a_pool_rests_while_the_writer_of_a_landing_may_go_on(
    local_cluster: Callable[..., Any],
) -> None:
    may_compute = threading.Event()
    async with open_roles(
        local_cluster,
        drain_s=0.0,
        quarantine_s=0.2,
        make_engine=lambda: HeldEngine(may_compute),
    ) as live:
        load = asyncio.create_task(live.require_tokens(n_requests=12, n_new=3))
        held = live.cluster.core.cluster.decodes.requests
        await live.cluster.until(
            lambda: live.cluster.core.n_requests["prefilling"] > 2 and len(held(FLEXIBLE)) > 1
        )
        with capture_logs() as logs:
            await live.change("prefill")
        may_compute.set()
        await load
    assert [each["seconds"] for each in logs if each["event"] == "pool_rests"] == [0.2]


async def test_the_last_worker_of_a_role_keeps_it_and_goes_on(
    local_cluster: Callable[..., Any],
) -> None:
    async with open_roles(local_cluster, n_decode=0) as live:
        with capture_logs() as logs:
            live.tell("prefill")
            await live.cluster.until(lambda: bool(refusals(logs)))
        assert "the last decode worker" in refusals(logs)[0]
        await live.until_it_takes("decode")
        await live.require_tokens()
        assert live.service.stages.count("ready") == 1


async def test_a_change_is_refused_while_the_metadata_server_is_away(
    local_cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_roles(local_cluster) as live:

        def refuse(*_: object, **__: object) -> None:
            raise MetadataError("a test")

        with monkeypatch.context() as away, capture_logs() as logs:
            for call in ("list", "get", "compare_and_swap"):
                away.setattr(live.cluster.store, call, refuse)
            live.tell("prefill")
            await live.cluster.until(lambda: bool(refusals(logs)))
        assert "the metadata server can't be asked" in refusals(logs)[0]
        await live.require_tokens()
        await live.change("prefill")
        await live.require_tokens()


async def test_a_change_within_the_cool_down_and_one_to_the_present_role_are_refused_by_name(
    local_cluster: Callable[..., Any],
) -> None:
    async with open_roles(local_cluster, role_cooldown_s=1000.0) as live:
        with capture_logs() as logs:
            live.tell("decode")
            await live.cluster.until(lambda: len(refusals(logs)) == 1)
            await live.change("prefill")
            live.tell("decode", "x" * 5000)
            await live.cluster.until(lambda: len(refusals(logs)) == 2)
        assert "is a decode worker already" in refusals(logs)[0]
        assert "role_cooldown_s (1000 s)" in refusals(logs)[1]
        await live.require_tokens()
        info = live.info
        assert info is not None and (info.role, info.draining) == ("prefill", False)


@pytest.mark.parametrize("role", ["kvstore", "prefill"])
async def test_a_role_that_a_worker_does_not_list_is_dropped(
    local_cluster: Callable[..., Any], role: Role
) -> None:
    plain: dict[str, Any] = {"kind": DecodeSettings, "roles": "decode"}
    async with open_roles(local_cluster, **(plain if role == "prefill" else {})) as live:
        dropped = DROPPED_MESSAGES.labels("unexpected")._value
        before = dropped.get()
        live.tell(role)
        await live.cluster.until(lambda: dropped.get() > before)
        await live.require_tokens()
        assert live.service.stages.count("ready") == 1


async def test_a_worker_told_to_stop_while_it_changes_stops(
    local_cluster: Callable[..., Any],
) -> None:
    slow = FakeModelSpec(step_s=0.01)
    async with open_roles(
        local_cluster,
        drain_s=30.0,
        model="fake://fake?step_s=0.01",
        make_engine=lambda: FakeEngine(slow),
    ) as live:
        held = live.cluster.core.cluster.decodes.requests
        load = asyncio.create_task(live.require_tokens(n_requests=12, n_new=200))
        await live.cluster.until(lambda: len(held(FLEXIBLE)) > 2)
        live.tell("prefill")
        await live.cluster.until(lambda: "draining" in live.service.stages)
        live.service.stopping.set()
        await load
    assert live.service.stages.count("ready") == 1


async def test_a_second_signal_ends_a_worker_whose_record_can_not_be_written(
    local_cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_roles(local_cluster, drain_s=30.0) as live:
        store = live.cluster.store
        writing, may_write, write = threading.Event(), threading.Event(), store.compare_and_swap

        def write_late(key: str, *value: Any, **how: Any) -> bool:
            if key.endswith(FLEXIBLE):
                writing.set()
                may_write.wait(60)
            return bool(write(key, *value, **how))

        monkeypatch.setattr(store, "compare_and_swap", write_late)
        live.tell("prefill")
        await live.cluster.until(writing.is_set)
        live.service.stopping.set()
        await asyncio.sleep(0)
        live.running.cancel()
        await asyncio.sleep(0)
        may_write.set()
        await live.cluster.until(live.running.done)
        assert live.running.cancelled()
        assert "draining" not in live.service.stages
