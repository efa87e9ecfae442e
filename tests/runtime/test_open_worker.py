"""What a worker opens, in which order it closes, and what a model gets."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_metadata import MetadataStore, open_store
from halfmoon_metadata.store_interface import MetadataUnreachable
from halfmoon_protocol.ids import ConductorId
from halfmoon_protocol.messages import DecodeCost, Hello
from halfmoon_runtime import membership
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.engine_settings import EngineSettings
from halfmoon_runtime.lifecycle import CannotStart
from halfmoon_runtime.membership import MEMBERS, list_members
from halfmoon_runtime.observability.metrics import MetricSnapshot
from halfmoon_runtime.observability.operator_http import OperatorHttp
from halfmoon_runtime.settings import ServiceSettings
from halfmoon_runtime.worker.open_model import load_model, model_info, place_model
from halfmoon_runtime.worker.open_worker import OpenedWorker, open_worker
from halfmoon_transfer import TransferStats
from halfmoon_transfer.open_transfer_engine import open_transfer_engine
from tests.runtime.service_parts import finds_nobody, some_service

NO_TRANSFERS = TransferStats(
    n_transfers=0, bytes_read=0, bytes_written=0, bytes_by_path={}, n_failures=0, n_retries=0,
    corrupted_by_path={}, n_live=0, n_regions=0, n_connections=0, n_mappings=0, n_malformed=0,
)  # fmt: skip


@dataclass
class Steps:
    """A transfer engine and a worker that write down what happens to them."""

    settings: ServiceSettings
    store: MetadataStore
    key: str
    seen: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)

    def open_transfer(self, name: str, **arguments: Any) -> AbstractContextManager["Steps"]:
        self.arguments = {"name": name, **arguments}
        return self._transfer()

    @contextmanager
    def _transfer(self) -> Iterator["Steps"]:
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
            self.seen.append("worker ended")

    async def drain(self) -> None:
        assert self.store.get(self.key) is not None
        self.seen.append("drained")

    def metrics(self) -> MetricSnapshot:
        return {}


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
        assert steps.store.get(steps.key) is None
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


async def test_its_port_answers_until_the_end_and_its_record_says_where(steps: Steps) -> None:
    network = ZmqNetwork()
    async with opened_worker(steps.settings, steps.open_transfer) as opened:
        assert (opened.env.info.role, opened.env.info.host) == ("decode", "here")
        link = await network.dial(opened.env.info.commands, opened.env.info.events)
        await link.send(Hello(ConductorId("conductor-0"), 0))
        _, message = await opened.env.port.receive()
        assert isinstance(message, Hello)
    await finds_nobody(link.receive())
    await network.close()


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


async def test_a_second_start_has_a_higher_generation_for_record_and_transfers(
    steps: Steps,
) -> None:
    async with some_service() as service:
        for generation in (1, 2):
            async with open_worker(
                steps.settings, service, "decode", steps.open_transfer
            ) as opened:
                assert opened.env.info.generation == generation
            assert steps.arguments["generation"] == generation
            assert steps.arguments["name"] == steps.settings.worker_id
            assert steps.arguments["bind"] == ["127.0.0.1"]


async def test_a_transfer_engine_that_cannot_open_leaves_nothing_behind(steps: Steps) -> None:
    def refuse(name: str, **arguments: Any) -> AbstractContextManager[Steps]:
        raise OSError("no such card")

    async with some_service() as service:
        with pytest.raises(OSError, match="no such card"):
            async with open_worker(steps.settings, service, "decode", refuse):
                pytest.fail("it must not open")
    assert await list_members(steps.store) == {}


# -- a model -----------------------------------------------------------------------------------


def model_settings(**changes: Any) -> EngineSettings:
    return EngineSettings(model="fake://", metrics_port=-1, **changes)


class Refused(Exception):
    """A model that this cluster does not serve."""


async def test_a_model_that_is_refused_ends_the_start_in_one_line() -> None:
    def refuse(spec: str, **arguments: Any) -> FakeEngine:
        raise Refused(f"{spec} is no model")

    async with some_service() as service:
        with pytest.raises(CannotStart, match="fake:// is no model"):
            await load_model(model_settings(), service, refuse, Refused)


async def test_a_model_gets_registered_pages_and_says_what_it_is(steps: Steps) -> None:
    engine = FakeEngine()
    unmeasured = model_settings(measure=False)
    async with (
        opened_worker(steps.settings, open_transfer_engine) as opened,
        place_model(unmeasured, opened.service, engine, 7, opened.env.transfer.allocate) as placed,
    ):
        assert placed.n_pages == 7
        assert placed.memory.region.length == placed.n_pages * engine.layout.block_bytes
        assert placed.decode_cost == DecodeCost()
        info = model_info(opened.env.info, model_settings(), engine, placed.n_pages)
        said = (info.layout, info.model, info.n_blocks)
        assert said == (engine.layout, engine.name, placed.n_pages)
        engine.detach()
