"""What a worker opens, in which order it goes into and out of service, and what ends its start."""

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_metadata import MemoryStore, MetadataStore, open_store
from halfmoon_metadata.store_interface import MetadataUnreachable
from halfmoon_runtime import membership
from halfmoon_runtime.engine_settings import EngineSettings
from halfmoon_runtime.lifecycle import CannotStart
from halfmoon_runtime.membership import MEMBERS, Membership, Superseded, list_members
from halfmoon_runtime.observability.metrics import MetricSnapshot
from halfmoon_runtime.observability.operator_http import OperatorHttp
from halfmoon_runtime.settings import ServiceSettings
from halfmoon_runtime.worker.open_model import load_model
from halfmoon_runtime.worker.open_worker import OpenedWorker, open_worker
from halfmoon_runtime.worker.registration import registered_worker
from halfmoon_transfer import TransferStats
from tests.runtime.service_parts import info_of, some_service

NO_TRANSFERS = TransferStats(
    n_transfers=0, bytes_read=0, bytes_written=0, bytes_by_path={}, n_failures=0, n_retries=0,
    corrupted_by_path={}, n_live=0, n_regions=0, n_connections=0, n_mappings=0, n_malformed=0,
)  # fmt: skip


def shown_steps() -> float | None:
    """What a scrape shows of a worker, which it does while the worker serves."""
    return REGISTRY.get_sample_value("halfmoon_test_steps")


@dataclass
class Steps:
    """A transfer engine and a worker that write down what happens to them."""

    settings: ServiceSettings
    store: MetadataStore
    key: str
    seen: list[str] = field(default_factory=list)

    @contextmanager
    def open_transfer(self, name: str, **arguments: Any) -> Iterator["Steps"]:
        self.seen.append("transfer opened")
        yield self
        self.seen.append("transfer closed")

    n_conductors = 0

    def stats(self) -> TransferStats:
        return NO_TRANSFERS

    def restore_record(self) -> None:
        pass

    async def serve(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            assert self.store.get(self.key) is None, "it answers while anybody may know of it"
            self.seen.append("worker ended")

    async def drain(self) -> None:
        assert self.store.get(self.key) is not None
        assert shown_steps() == 1.0
        self.seen.append("drained")

    def metrics(self) -> MetricSnapshot:
        return {"halfmoon_test_steps": ("What happened.", float(len(self.seen)))}


@pytest.fixture
def steps() -> Steps:
    settings = ServiceSettings(
        worker_id="decode-7", metadata=f"memory://{uuid.uuid4()}", host_id="here", metrics_port=-1
    )
    return Steps(settings, open_store(settings.metadata), MEMBERS + settings.worker_id)


@asynccontextmanager
async def opened_worker(
    settings: ServiceSettings, open_transfer: Callable[..., Any]
) -> AsyncIterator[OpenedWorker[Any]]:
    async with (
        some_service() as service,
        open_worker(settings, service, "decode", open_transfer) as opened,
    ):
        yield opened


async def serve_until_ready(opened: OpenedWorker[Steps], steps: Steps) -> None:
    """Serve a worker until it is ready, then stop its service."""

    async def stop() -> None:
        while not opened.service.is_ready:
            await asyncio.sleep(0.001)
        opened.service.stopping.set()

    stopping = asyncio.create_task(stop())
    await opened.serve(steps, opened.env.membership(opened.env.info), steps.drain)
    await stopping


async def test_a_worker_drains_while_it_is_known_and_closes_in_reverse(steps: Steps) -> None:
    async with opened_worker(steps.settings, steps.open_transfer) as opened:
        assert await list_members(steps.store) == {}, "known before it can answer"
        await serve_until_ready(opened, steps)
        assert (steps.store.get(steps.key), shown_steps()) == (None, None)
    assert steps.seen == ["transfer opened", "drained", "worker ended", "transfer closed"]


async def test_a_metadata_server_that_goes_away_in_mid_start_is_waited_for(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has counted the start; it does not take the segment's record at first."""
    monkeypatch.setattr(membership, "_RETRY_S", 0.01)
    n_failures = 3

    def open_transfer(name: str, **arguments: Any) -> AbstractContextManager[Steps]:
        nonlocal n_failures
        if n_failures:
            n_failures -= 1
            raise MetadataUnreachable("the metadata server does not answer")
        return steps.open_transfer(name, **arguments)

    async with opened_worker(steps.settings, open_transfer) as opened:
        await serve_until_ready(opened, steps)
    assert (n_failures, steps.seen.count("transfer opened")) == (0, 1)


async def test_its_record_says_where_http_is(steps: Steps) -> None:
    http = OperatorHttp(asyncio.get_running_loop(), lambda: True, registry=CollectorRegistry())
    http.start(0, steps.settings.host)
    async with some_service() as service:
        async with open_worker(steps.settings, service, "decode", steps.open_transfer) as opened:
            assert opened.env.info.http == ""
        service.http = http
        elsewhere = steps.settings.model_copy(update={"advertise_host": "gpu-3"})
        async with open_worker(elsewhere, service, "decode", steps.open_transfer) as opened:
            assert opened.env.info.http == http.url("gpu-3") != http.url(steps.settings.host)
    http.stop()


# -- a model -----------------------------------------------------------------------------------


class Refused(Exception):
    """A model that this cluster does not serve."""


async def test_a_model_that_is_refused_ends_the_start_in_one_line() -> None:
    def refuse(spec: str, **arguments: Any) -> FakeEngine:
        raise Refused(f"{spec} is no model")

    async with some_service() as service:
        with pytest.raises(CannotStart, match="fake:// is no model"):
            await load_model(EngineSettings(model="fake://"), service, refuse, Refused)


# -- registration ---------------------------------------------------------------------------------


INFO = info_of("decode-0")
KEY = MEMBERS + INFO.worker_id


class Worker:
    """Says whether it is serving."""

    def __init__(self) -> None:
        self.serving = False

    async def serve(self) -> None:
        self.serving = True
        try:
            await asyncio.Event().wait()
        finally:
            self.serving = False

    def metrics(self) -> MetricSnapshot:
        return {"halfmoon_test_in_service": ("Whether it serves.", float(self.serving))}


def reading() -> float | None:
    return REGISTRY.get_sample_value("halfmoon_test_in_service")


async def test_a_superseded_start_is_not_ready_and_leaves_nothing_running() -> None:
    store = MemoryStore()
    worker = Worker()
    await Membership(store, msgspec.structs.replace(INFO, generation=2)).join()
    async with some_service() as service:
        with pytest.raises(Superseded):
            async with registered_worker(worker, Membership(store, INFO), service):
                pytest.fail("it must not be at work")
        assert not service.is_ready
        assert (worker.serving, reading()) == (False, None)
    assert store.get(KEY) is not None, "the later start's record stays"


class SlowStore(MemoryStore):
    """Holds each write back until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.writing, self.go_on = threading.Event(), threading.Event()

    def compare_and_swap(self, *args: Any, **kwargs: Any) -> bool:
        self.writing.set()
        assert self.go_on.wait(60)
        return super().compare_and_swap(*args, **kwargs)


async def test_a_stop_in_the_middle_of_joining_leaves_no_record() -> None:
    store = SlowStore()

    async def run() -> None:
        async with (
            some_service() as service,
            registered_worker(Worker(), Membership(store, INFO), service),
        ):
            raise AssertionError("it joined")

    joining = asyncio.create_task(run())
    await asyncio.to_thread(store.writing.wait, 60)
    joining.cancel()
    store.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await joining
    assert store.get(KEY) is None
