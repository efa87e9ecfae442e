"""The order in which a worker goes into service and out of it."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from halfmoon_metadata import MemoryStore
from halfmoon_runtime.membership import MEMBERS, Membership, Superseded
from halfmoon_runtime.observability.metrics import MetricSnapshot
from halfmoon_runtime.worker.registration import registered_worker
from tests.runtime.service_parts import info_of, some_service

INFO = info_of("decode-0")
KEY = MEMBERS + INFO.worker_id


class Worker:
    """Says whether it was known when it ended."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.serving = False
        #: Whether the metadata server still knew of it when it ended.
        self.was_known: bool | None = None

    async def serve(self) -> None:
        self.serving = True
        try:
            await asyncio.Event().wait()
        finally:
            self.serving = False
            self.was_known = self._store.get(KEY) is not None

    def metrics(self) -> MetricSnapshot:
        return {"halfmoon_test_in_service": ("Whether it serves.", float(self.serving))}


def reading() -> float | None:
    return REGISTRY.get_sample_value("halfmoon_test_in_service")


async def test_it_answers_as_long_as_anybody_may_know_of_it() -> None:
    store = MemoryStore()
    worker = Worker(store)
    async with some_service() as service:
        async with registered_worker(worker, Membership(store, INFO), service):
            await asyncio.sleep(0)  # a task that never began can't be said to end
            assert service.is_ready
            assert store.get(KEY) is not None
            assert (worker.serving, reading()) == (True, 1.0)
        assert (worker.serving, store.get(KEY), reading()) == (False, None, None)
    assert worker.was_known is False


async def test_a_superseded_start_is_not_ready_and_leaves_nothing_running() -> None:
    store = MemoryStore()
    worker = Worker(store)
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
            registered_worker(Worker(store), Membership(store, INFO), service),
        ):
            raise AssertionError("it joined")

    joining = asyncio.create_task(run())
    await asyncio.to_thread(store.writing.wait, 60)
    joining.cancel()
    store.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await joining
    assert store.get(KEY) is None
