"""When the pages of a landing that has ended are another request's, and who still writes then."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_protocol.ids import ConductorId, RequestId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    DecodeReserved,
    Hello,
)
from halfmoon_protocol.regions import Landing, Region
from halfmoon_protocol.sampling import Stopping
from halfmoon_runtime.clock import FakeClock
from halfmoon_scheduling.decode.decode_batch import DecodeBatch
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_testing.worker_caller import WorkerCaller
from halfmoon_transfer.regions.grant_revocation import GrantRevocation
from halfmoon_workers.decode.landing_ends import LandingEnds
from halfmoon_workers.decode.landing_keys import LandingKeys
from tests.services.asking import GatedEngine, dial, reserve, start_prefill

A = RequestId("a")
STOPPING = Stopping(max_new_tokens=8)
LAYOUT = KvLayout(model="m", n_layers=1, n_kv_heads=1, head_dim=1, dtype="float32", block_size=4)
QUARANTINE_S, TTL_S = 6.0, 30.0


class Lender:
    """Lends keys of grants, or none; a write may go on after its key was taken back."""

    def __init__(
        self, *, shared: bool = False, ends: bool = True, write: threading.Event | None = None
    ) -> None:
        self.shared, self.ends, self.write = shared, ends, write
        self.lent: set[RequestId] = set()
        self.n_cuts = 0
        self.quiet = True

    def lend(self, request_id: RequestId, *_: Any) -> Region:
        if not self.shared:
            self.lent.add(request_id)
        return Region("s", 1, bytes(16), 64)

    def begin_take_back(self, request_id: RequestId) -> GrantRevocation | None:
        if request_id not in self.lent:
            return None
        self.lent.remove(request_id)
        return GrantRevocation(lambda: self.ends, self._wait)

    def _wait(self, _: float) -> bool:
        """Wait in a thread until the test lets the last write end."""
        if self.write is not None:
            assert self.write.wait(90)
            self.ends = True
        return self.ends

    def cut(self) -> None:
        self.n_cuts += 1

    def is_quiet(self) -> bool:
        return self.quiet


class Scene:
    def __init__(self, lender: Lender) -> None:
        self.lender, self.clock = lender, FakeClock()
        self.batch = DecodeBatch(
            PageAllocator(4), block_size=4, max_running=4, max_context=64, landing_ttl_s=TTL_S
        )
        region = Region("s", 1, bytes(16), 64)
        keys = LandingKeys(region, LAYOUT, TTL_S, lender)  # type: ignore[arg-type]
        self.ends = LandingEnds(self.batch, keys, self.clock, QUARANTINE_S)
        keys.open(A, self.batch.reserve(A, 8, STOPPING, self.clock.now()), 0)

    def free_after(self, seconds: float) -> int:
        self.clock.advance(seconds)
        self.ends.expire()
        self.batch.check()
        return self.batch.free_pages


@pytest.mark.parametrize("in_doubt", [False, True])
def test_pages_written_by_a_key_of_their_own_are_free_when_it_is_taken_back(in_doubt: bool) -> None:
    scene = Scene(Lender(shared=False))
    scene.ends.free(A, in_doubt=in_doubt)
    assert (scene.batch.free_pages, scene.lender.n_cuts) == (4, 0)


def test_pages_rest_when_a_write_goes_on_after_its_key_was_taken_back() -> None:
    scene = Scene(Lender(shared=False, ends=False))
    scene.ends.free(A, in_doubt=False)
    assert scene.free_after(QUARANTINE_S * 0.9) == 2
    assert scene.free_after(QUARANTINE_S * 0.2) == 4


async def test_pages_are_free_as_soon_as_the_last_write_has_ended_and_nothing_is_cut_then() -> None:
    write = threading.Event()
    scene = Scene(Lender(ends=False, write=write))
    async with asyncio.TaskGroup() as tasks:
        scene.ends.open(tasks)
        scene.ends.free(A, in_doubt=True)
        await asyncio.sleep(0)  # the wait for the write has begun, and this loop goes on
        assert scene.free_after(0.0) == 2
        write.set()
    assert scene.free_after(0.0) == 4
    scene.free_after(QUARANTINE_S)
    assert scene.lender.n_cuts == 0


@pytest.mark.parametrize("ends", [False, True])
async def test_a_landing_starts_once_its_last_write_has_ended(ends: bool) -> None:
    scene = Scene(Lender(ends=False, write=threading.Event() if ends else None))
    revocation = scene.ends.take_back_key(A)
    assert revocation is not None and scene.ends.is_closing(A)
    waiting = asyncio.create_task(scene.ends.last_write(A, revocation))
    await asyncio.sleep(0)
    assert not waiting.done()
    if scene.lender.write is not None:
        scene.lender.write.set()
    assert await waiting is ends
    assert scene.ends.is_closing(A) is not ends, "its pages can't be free before the write ends"
    scene.ends.free(A, in_doubt=False)
    assert scene.free_after(0.0) == (4 if ends else 2)


async def test_a_landing_that_is_freed_while_its_last_write_goes_on_is_not_started() -> None:
    write = threading.Event()
    scene = Scene(Lender(ends=False, write=write))
    revocation = scene.ends.take_back_key(A)
    assert revocation is not None
    waiting = asyncio.create_task(scene.ends.last_write(A, revocation))
    async with asyncio.TaskGroup() as tasks:
        scene.ends.open(tasks)
        scene.ends.free(A, in_doubt=False)
        assert (scene.free_after(0.0), A in scene.batch) == (2, False)
        again = scene.batch.reserve(A, 4, STOPPING, scene.clock.now())
        write.set()
    assert await waiting is None, "the landing of this name is another one"
    assert scene.batch.landing_pages(A) == tuple(again)
    assert scene.free_after(0.0) == 3


def test_pages_of_a_shared_key_rest_if_the_writer_may_not_know_and_it_is_cut_off_before() -> None:
    scene = Scene(Lender(shared=True))
    scene.ends.free(A, in_doubt=True)
    assert scene.free_after(QUARANTINE_S - 1.1) == 2
    assert scene.lender.n_cuts == 0, "its writes may begin even now"
    assert scene.free_after(0.2) == 2
    assert scene.lender.n_cuts == 1
    assert scene.free_after(0.7) == 2
    assert scene.free_after(0.5) == 4
    assert scene.lender.n_cuts == 1


def test_pages_rest_for_as_long_as_a_writer_is_stopped_in_the_middle_of_its_copy() -> None:
    scene = Scene(Lender(shared=True))
    scene.ends.free(A, in_doubt=True)
    scene.lender.quiet = False
    for _ in range(5):
        assert scene.free_after(QUARANTINE_S) == 2
    scene.lender.quiet = True
    assert scene.free_after(0.1) == 4


def test_a_cut_that_comes_late_is_given_its_time_before_pages_are_free() -> None:
    scene = Scene(Lender(shared=True))
    scene.ends.free(A, in_doubt=True)
    assert scene.free_after(2 * QUARANTINE_S) == 2, "this process stood still itself"
    assert scene.lender.n_cuts == 1
    assert scene.free_after(1.1) == 4


def test_pages_of_a_writer_that_has_stopped_are_free_at_once() -> None:
    scene = Scene(Lender(shared=True))
    scene.ends.free(A, in_doubt=False)
    assert (scene.batch.free_pages, scene.lender.n_cuts) == (4, 0)


@pytest.mark.parametrize(("shared", "n_free"), [(True, 2), (False, 4)])
def test_a_landing_that_ran_out_ends_as_one_in_doubt(shared: bool, n_free: int) -> None:
    scene = Scene(Lender(shared=shared))
    assert scene.free_after(TTL_S) == n_free
    assert A not in scene.batch
    scene.free_after(QUARANTINE_S - 0.5)
    assert scene.free_after(1.0) == 4


async def begin(cluster: Any) -> tuple[Any, WorkerCaller, Landing]:
    """A prefill worker, a conductor of its own, and a landing at decode of which it has charge."""
    decode, conductor = await dial(cluster, "decode-0"), await dial(cluster, "prefill-0")
    await decode.send(reserve(A, 40))
    (landed,) = await decode.wait_for(DecodeReserved)
    await conductor.send(Hello(conductor_id=ConductorId("east"), session=1))
    return cluster.worker("prefill-0"), conductor, landed.landing


async def test_a_prefill_whose_conductor_is_gone_ends_within_seconds_and_writes_no_more(
    local_cluster: Callable[..., Any],
) -> None:
    """It sends nothing until its end: it has to look whether the conductor is there."""
    async with local_cluster(GatedEngine) as cluster:
        prefill, conductor, landing = await begin(cluster)
        engine = cluster.members["prefill-0"].engine
        engine.gate.clear()
        await conductor.send(start_prefill(A, range(40), landing, landing_expires_s=600.0))
        await cluster.until(engine.inside.is_set)
        pool = cluster.memories["decode-0"].view
        before = bytes(pool[:])
        await conductor.close()
        await cluster.until(lambda: not prefill.conductors.owners.request_ids())
        engine.gate.set()
        await cluster.until(lambda: not prefill.jobs)
        assert bytes(pool[:]) == before


async def test_a_prefill_that_stood_still_writes_nothing_before_it_knows_what_it_missed(
    local_cluster: Callable[..., Any],
) -> None:
    """By then decode may have given the landing's pages to another request."""
    async with local_cluster(FakeEngine) as cluster:
        prefill, conductor, landing = await begin(cluster)
        pool = cluster.memories["decode-0"].view
        before = bytes(pool[:])
        prefill.conductors.is_current = lambda _: False
        await conductor.send(start_prefill(A, range(40), landing, landing_expires_s=600.0))
        await cluster.until(lambda: bool(prefill.jobs) and not prefill.machine.queue)
        (job,) = prefill.jobs.values()
        await cluster.until(lambda: bool(job.landing_writes))
        await conductor.close()
        await cluster.until(lambda: not prefill.jobs)
        assert bytes(pool[:]) == before
