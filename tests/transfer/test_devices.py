"""Memory of devices: the drivers' contract, what is recognised, how bytes pass through the host."""

import gc
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.regions import Region
from halfmoon_transfer import Lost, Notification, Piece, Rejected, TransferSettings
from halfmoon_transfer.backends.backend_interface import CarryRequest
from halfmoon_transfer.backends.cuda import cuda_wire
from halfmoon_transfer.backends.cuda.cuda_wire import (
    CudaRegionRequest,
    CudaWireError,
)
from halfmoon_transfer.backends.device_staging import carry_staged
from halfmoon_transfer.devices import cuda_device
from halfmoon_transfer.devices.device_interface import (
    CopyEvent,
    DeviceError,
    DeviceMemory,
    IpcHandle,
    NotExportable,
)
from halfmoon_transfer.devices.device_region import DeviceRegion
from halfmoon_transfer.devices.device_spans import DeviceSpan, device_span, host_view
from halfmoon_transfer.devices.emulated_device import EmulatedBuffer, EmulatedDevice
from halfmoon_transfer.devices.local_region import LocalRegion
from halfmoon_transfer.devices.pinned_pool import PinnedPool, PinnedRun
from halfmoon_transfer.interface import BackendUnavailable
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor
from halfmoon_transfer.planning.transfer_plan import (
    APPLIED,
    Batch,
    OutcomeKind,
    PeerKey,
    Slice,
    SliceOutcome,
)
from halfmoon_transfer.threads.stop_signal import StopSignal

Eventually = Callable[..., None]
PATIENCE_S = 60.0
KIB = 1024


def noise(n_bytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(n_bytes)


# What both drivers do.


class Rig:
    """A device, and a way to get memory on it."""

    def __init__(self, device: DeviceMemory, allocate: Callable[[int], Any]) -> None:
        self.device = device
        self._allocate = allocate
        self._held: list[Any] = []

    def allocate(self, n_bytes: int) -> int:
        made = self._allocate(n_bytes)
        self._held.append(made)
        return made if isinstance(made, int) else int(made.address)

    def forget(self) -> None:
        self._held.clear()

    def put(self, address: int, data: bytes) -> None:
        self.device.copy_in(memoryview(bytearray(data)), address).wait()

    def get(self, address: int, n_bytes: int) -> bytes:
        into = bytearray(n_bytes)
        self.device.copy_out(address, memoryview(into)).wait()
        return bytes(into)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    if request.param == "emulated":
        device: DeviceMemory = EmulatedDevice()
        rig = Rig(device, EmulatedBuffer)
        yield rig
        rig.forget()
        device.close()
        return
    try:
        device = cuda_device.open_device("cuda:0")
    except (BackendUnavailable, DeviceError) as error:
        pytest.skip(f"no CUDA device: {error}")
    made: list[int] = []

    def allocate(n_bytes: int) -> int:
        with device._current():
            made.append(int(cuda_device._call("cuMemAlloc", n_bytes)))
        return made[-1]

    yield Rig(device, allocate)
    with device._current():
        for address in made:
            cuda_device._call("cuMemFree", address)
    device.close()


@pytest.mark.parametrize("n_bytes", [1, 2, 1000, 65_537, 3_000_001])
def test_copies_to_and_from_a_device_are_exact(rig: Rig, n_bytes: int) -> None:
    address = rig.allocate(n_bytes + 20)
    rig.put(address, bytes(n_bytes + 20))
    data = noise(n_bytes, 1)
    rig.put(address + 7, data)
    assert rig.get(address, n_bytes + 20) == bytes(7) + data + bytes(13)
    rig.device.copy_within(address + 7, address, n_bytes).wait()
    assert rig.get(address, n_bytes) == data


def test_copies_of_one_direction_are_made_in_order(rig: Rig) -> None:
    address = rig.allocate(100_000)
    written = [bytearray([number]) * 100_000 for number in range(20)]
    events = [rig.device.copy_in(memoryview(each), address) for each in written]
    for event in events:
        event.wait()
    assert rig.get(address, 100_000) == written[-1]


_CHILD = """
import sys
from halfmoon_transfer.devices import cuda_device, emulated_device
from halfmoon_transfer.devices.device_interface import IpcHandle
identity, token, offset, n_bytes = sys.argv[1:]
driver = cuda_device if identity.startswith("cuda") else emulated_device
device = driver.open_device(driver.find(identity))
address = device.open_handle(IpcHandle(bytes.fromhex(token), int(offset)))
again = device.open_handle(IpcHandle(bytes.fromhex(token), int(offset)))
device.close_handle(again)
view = memoryview(bytearray(int(n_bytes)))
device.copy_out(address, view).wait()
device.copy_in(memoryview(bytes(view)[::-1]), address).wait()
device.close_handle(address)
device.close()
"""


def test_another_process_opens_what_was_exported(rig: Rig) -> None:
    address = rig.allocate(100_000)
    data = noise(10_000, 3)
    rig.put(address + 4321, data)
    handle = rig.device.export(address + 4321, 10_000)
    arguments = (rig.device.identity, handle.token.hex(), str(handle.offset), "10000")
    subprocess.run([sys.executable, "-c", _CHILD, *arguments], check=True, timeout=PATIENCE_S)
    assert rig.get(address + 4321, 10_000) == data[::-1]


def test_what_is_no_handle_is_not_opened(rig: Rig) -> None:
    with pytest.raises(DeviceError):
        rig.device.open_handle(IpcHandle(b"1/2", 0))
    with pytest.raises(DeviceError, match="nothing is open"):
        rig.device.close_handle(4096)


@pytest.mark.cuda
def test_a_dma_buf_covers_the_range_or_is_refused(rig: Rig) -> None:
    address = rig.allocate(100_000)
    try:
        made = rig.device.dma_buf(address + 5000, 1000)
    except NotExportable:
        return
    assert 0 <= made.offset < 4096 + 5000


def test_without_a_driver_the_way_out_is_named() -> None:
    try:
        cuda_device.open_device("cuda:0").close()
    except BackendUnavailable as error:
        assert "halfmoon-transfer[cuda]" in str(error) or "driver" in str(error)
    else:
        pytest.skip("there is a CUDA device")


# What is recognised.


class OnDevice:
    """What arrays on NVIDIA devices offer."""

    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = {"version": 3, "typestr": "<f4", **interface}


def test_arrays_on_devices_are_told_by_what_they_offer() -> None:
    found = device_span(OnDevice(shape=(3, 5), data=(0x7000, True)))
    assert found is not None
    assert (found.location, found.address, found.length) == ("cuda", 0x7000, 60)
    assert not found.writable
    packed = device_span(OnDevice(shape=(3, 5), data=(0x7000, False), strides=(20, 4)))
    assert packed is not None and packed.writable
    with pytest.raises(ValueError, match="contiguous: False"):
        device_span(OnDevice(shape=(3, 5), data=(0x7000, False), strides=(40, 4)))
    with pytest.raises(ValueError, match="0 bytes"):
        device_span(OnDevice(shape=(0, 5), data=(0, False)))
    assert device_span(bytearray(10)) is None


def test_torch_tensors_of_any_type_are_registered(make_world: Any) -> None:
    torch = pytest.importorskip("torch")
    world = make_world("tcp")
    here, there = world.open("here"), world.open("there")
    for kind in (torch.bfloat16, torch.float32, torch.int64, torch.uint8):
        source = torch.arange(7, 1007).to(kind).reshape(10, 100)
        target = torch.zeros(10, 100, dtype=kind)
        n_bytes = source.nbytes
        local, remote = here.register(source), there.register(target)
        assert (local.length, remote.length) == (n_bytes, n_bytes)
        here.submit("write", [Piece(local, 0, remote, 0, n_bytes)]).result(PATIENCE_S)
        assert torch.equal(source, target)
    with pytest.raises(ValueError, match="contiguous: False"):
        here.register(torch.zeros(4, 4).T)
    with pytest.raises(ValueError, match="tensor on meta"):
        here.register(torch.zeros(4, device="meta"))


def test_a_tensor_lives_as_long_as_its_view() -> None:
    torch = pytest.importorskip("torch")
    view = host_view(torch.full((1000,), 7, dtype=torch.uint8))
    assert bytes(view) == bytes([7]) * 1000


def test_numpy_arrays_of_any_type_are_bytes() -> None:
    array = np.arange(12).astype("datetime64[D]").reshape(3, 4)
    assert bytes(host_view(array)) == array.tobytes()
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    assert host_view(read_only).readonly
    with pytest.raises(ValueError, match="contiguous: False"):
        host_view(np.zeros((4, 4)).T)


@pytest.mark.cuda
def test_a_cuda_tensor_is_both_sides_of_a_transfer(make_world: Any) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    for backends in ("tcp", "cuda"):
        world = make_world(backends)
        here, there = world.open("here"), world.open("there")
        source = torch.randn(1_000_003, device="cuda").to(torch.bfloat16)
        target, back = torch.zeros_like(source), torch.zeros_like(source)
        torch.cuda.synchronize()
        n_bytes = source.nbytes
        regions = [here.register(source), there.register(target), here.register(back)]
        here.submit("write", [Piece(regions[0], 0, regions[1], 0, n_bytes)]).result(PATIENCE_S)
        here.submit("read", [Piece(regions[2], 0, regions[1], 0, n_bytes)]).result(PATIENCE_S)
        assert torch.equal(source, target)
        assert torch.equal(source, back)


# Pinned memory.


@given(st.lists(st.tuples(st.integers(1, 60_000), st.booleans()), max_size=40))
def test_lent_runs_never_overlap_and_all_come_back(steps: list[tuple[int, bool]]) -> None:
    pool = PinnedPool(memoryview(bytearray(200_000)))
    whole = pool.free_bytes
    held: list[tuple[PinnedRun, int]] = []
    for number, (n_bytes, give_back) in enumerate(steps):
        if give_back and held:
            run, mark = held.pop(0)
            assert bytes(run.view) == bytes([mark]) * len(run.view), "somebody else wrote there"
            pool.release(run)
        taken = pool.take(n_bytes)
        if taken is not None:
            taken.view[:] = bytes([number]) * n_bytes
            held.append((taken, number))
        assert sum(len(each.view) for each, _ in held) <= whole - pool.free_bytes
    for run, _ in held:
        pool.release(run)
    assert pool.free_bytes == whole == pool.n_bytes


def test_who_waits_for_room_gets_it_or_is_stopped(eventually: Eventually) -> None:
    pool = PinnedPool(memoryview(bytearray(100_000)))
    first = pool.take(60_000)
    assert first is not None
    assert pool.take(60_000) is None
    assert pool.take(10_000, reserve=50_000) is None
    stop, got = StopSignal.after(PATIENCE_S), []
    threads = [
        threading.Thread(target=lambda: got.append(pool.wait(60_000, stop)), daemon=True)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    pool.release(first)
    eventually(lambda: len(got) == 1)
    assert got[0] is not None
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert got[1] is None


# Staging.


class Watched(EmulatedDevice):
    """Notes when copies begin and end."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log
        self.broken = False
        self._n = {"in": 0, "out": 0}

    def copy_out(self, address: int, view: memoryview) -> Any:
        return self._noted("out", lambda: super(Watched, self).copy_out(address, view))

    def copy_in(self, view: memoryview, address: int) -> Any:
        return self._noted("in", lambda: super(Watched, self).copy_in(view, address))

    def _noted(self, way: str, begin: Callable[[], CopyEvent]) -> Any:
        number = self._n[way]
        self._n[way] += 1
        self.log.append(f"{way} {number}")
        if self.broken:
            raise DeviceError("it fell off the bus", 79)
        event, log = begin(), self.log

        class Noted:
            def wait(self) -> None:
                event.wait()
                log.append(f"{way} {number} done")

        return Noted()


class Bench:
    """A device region, staged to a peer that is a `bytearray`."""

    PART = 10_000

    def __init__(self, n_bytes: int, *, pool_bytes: int = 40_960, slice_bytes: int = 5_000) -> None:
        self.log: list[str] = []
        self.device = Watched(self.log)
        self.buffer = EmulatedBuffer(n_bytes)
        self.pool = PinnedPool(memoryview(bytearray(pool_bytes)))
        self.region = Region("here", 1, b"d" * 16, n_bytes)
        self.pinned = Region("here", 1, b"p" * 16, pool_bytes)
        remote = Region("there", 1, b"r" * 16, n_bytes)
        self.peer = bytearray(noise(n_bytes, 5))
        self.buffer.view[:] = noise(n_bytes, 6)
        self.slices = tuple(
            Slice(number, self.region, at, remote, at, min(slice_bytes, n_bytes - at))
            for number, at in enumerate(range(0, n_bytes, slice_bytes))
        )
        self.stop = StopSignal.after(PATIENCE_S)
        self.n_carried = 0
        self.fates: Callable[[int], SliceOutcome] = lambda number: APPLIED

    def carry(self, errand: CarryRequest) -> Sequence[SliceOutcome]:
        """A backend: notes when it is at work."""
        self.log.append(f"carry {self.n_carried}")
        self.n_carried += 1
        outcomes = []
        for each, view in zip(errand.batch.slices, errand.local, strict=True):
            assert each.local is self.pinned, "backends see host memory only"
            assert len(view) == each.length
            there = memoryview(self.peer)[each.remote_offset : each.remote_offset + each.length]
            outcome = self.fates(each.number)
            if outcome is APPLIED:
                if errand.batch.op == "write":
                    there[:] = view
                else:
                    view[:] = there
            outcomes.append(outcome)
        return outcomes

    def move(self, op: Any, part_bytes: int = PART) -> list[SliceOutcome]:
        batch = Batch(0, 0, op, PeerKey("there", 1), "wire", self.slices)
        errand = CarryRequest(batch, SegmentDescriptor("there", 1, "", {}), (), self.stop)
        region = DeviceRegion(self.buffer.span(), self.device, self.pool)
        locals_ = {self.region.key: LocalRegion(memoryview(b""), region, self.pool, self.pinned)}
        outcomes = carry_staged(errand, locals_, self.carry, part_bytes)
        assert self.pool.free_bytes == self.pool.n_bytes, "room was kept"
        return outcomes


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*arguments: Any, **options: Any) -> Bench:
        made.append(Bench(*arguments, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.device.close()
        del bench.buffer


def test_while_a_part_is_written_the_next_is_copied_out(make_bench: Any) -> None:
    bench = make_bench(30_000)
    assert bench.move("write") == [APPLIED] * 6
    assert bench.peer == bench.buffer.view
    assert bench.log == [
        "out 0",
        "out 1",
        "out 0 done",
        "carry 0",
        "out 2",
        "out 1 done",
        "carry 1",
        "out 2 done",
        "carry 2",
    ]


def test_while_a_part_is_read_the_one_before_is_copied_in(make_bench: Any) -> None:
    bench = make_bench(30_000)
    assert bench.move("read") == [APPLIED] * 6
    assert bench.peer == bench.buffer.view
    assert bench.log == [
        "carry 0",
        "in 0",
        "carry 1",
        "in 1",
        "in 0 done",
        "carry 2",
        "in 2",
        "in 1 done",
        "in 2 done",
    ]


@pytest.mark.parametrize("op", ["read", "write"])
def test_with_room_for_one_part_parts_take_turns(make_bench: Any, op: Any) -> None:
    bench = make_bench(30_000, pool_bytes=12_288)
    assert bench.move(op) == [APPLIED] * 6
    assert bench.peer == bench.buffer.view
    if op == "write":
        assert bench.log[:4] == ["out 0", "out 0 done", "carry 0", "out 1"]
    else:
        assert bench.log[:4] == ["carry 0", "in 0", "in 0 done", "carry 1"]


@pytest.mark.parametrize("op", ["read", "write"])
def test_slices_longer_than_a_part_are_cut_and_applied_as_one(make_bench: Any, op: Any) -> None:
    bench = make_bench(50_000, slice_bytes=23_000)
    assert bench.move(op) == [APPLIED] * 3
    assert bench.peer == bench.buffer.view
    assert bench.n_carried == 6


def test_only_what_arrived_is_copied_into_the_device(make_bench: Any) -> None:
    bench = make_bench(20_000)
    before = bytes(bench.buffer.view)
    broken = SliceOutcome(OutcomeKind.CORRUPTED, "damaged")
    bench.fates = lambda number: broken if number == 1 else APPLIED
    assert bench.move("read") == [APPLIED, broken, APPLIED, APPLIED]
    assert bench.buffer.view[5_000:10_000] == before[5_000:10_000]
    assert bench.buffer.view[10_000:] == bench.peer[10_000:]


def test_a_path_that_loses_everything_is_left(make_bench: Any) -> None:
    bench = make_bench(100_000)
    lost = SliceOutcome(OutcomeKind.LOST, "no peer there")
    bench.fates = lambda number: lost
    assert bench.move("write") == [lost] * 20
    assert bench.n_carried == 2


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_device_that_fails_rejects_and_says_why(make_bench: Any, op: Any) -> None:
    bench = make_bench(30_000)
    bench.device.broken = True
    outcomes = bench.move(op)
    assert {each.kind for each in outcomes} == {OutcomeKind.REJECTED}
    assert "in device memory: it fell off the bus" in outcomes[0].reason


def test_a_transfer_that_is_stopped_copies_no_more(make_bench: Any) -> None:
    bench = make_bench(100_000)

    def stop(number: int) -> SliceOutcome:
        bench.stop.set()
        return APPLIED

    bench.fates = stop
    outcomes = bench.move("write")
    assert bench.n_carried == 1
    assert [each.kind for each in outcomes] == [OutcomeKind.APPLIED] * 2 + [OutcomeKind.LOST] * 18
    assert "out 2" not in bench.log


def test_requests_of_peers_leave_half_of_the_room_to_us(make_bench: Any) -> None:
    bench = make_bench(30_000, pool_bytes=40_960)
    region = DeviceRegion(bench.buffer.span(), bench.device, bench.pool)
    with region.lend_buffer(0, 20_000) as pinned, region.lend_buffer(0, 20_000) as other:
        assert bench.pool.free_bytes == 20_480
        assert len(pinned) == len(other) == 20_000
        region.load(0, other)
        assert other == bench.buffer.view[:20_000]
    assert bench.pool.free_bytes == 40_960


# The messages of handles.


@given(st.binary(max_size=60))
def test_other_messages_about_handles_are_none(message: bytes) -> None:
    for read in (cuda_wire.decode_request, cuda_wire.decode_reply):
        with pytest.raises(CudaWireError):
            read(message)
    with pytest.raises(CudaWireError, match="a key of 3 bytes"):
        cuda_wire.decode_request(cuda_wire.encode(CudaRegionRequest(1, b"abc")))


def test_garbage_on_the_socket_of_handles_ends_that_connection_only(make_world: Any) -> None:
    world = make_world("cuda")
    here, there = world.open("here"), world.open("there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect("\0" + there.descriptor.endpoints["cuda"].address)
        sock.send(b"garbage")
        assert sock.recv(100) == b""
    assert there.stats().n_malformed == 1
    _, region = device_memory(there, 1000, 1)
    local = here.allocate(1000)
    here.submit("read", [Piece(local.region, 0, region, 0, 1000)]).result(PATIENCE_S)


def test_processes_of_other_users_get_no_handle(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world("cuda")
    here, there = world.open("here"), world.open("there")
    _, region = device_memory(there, 1000, 1)
    local = here.allocate(1000)
    address = there.descriptor.endpoints["cuda"].address
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect("\0" + address)
        assert sock.recv(100) == b""
    with pytest.raises(Lost, match="another user"):
        here.submit("read", [Piece(local.region, 0, region, 0, 1000)]).result(PATIENCE_S)


# Engines.


def device_memory(engine: Any, n_bytes: int, seed: int, **options: Any) -> tuple[Any, Region]:
    buffer = EmulatedBuffer(n_bytes, **options)
    buffer.view[:] = noise(n_bytes, seed)
    return buffer, engine.register(buffer.span())


def test_the_location_of_device_memory_is_the_device(make_world: Any) -> None:
    here = make_world("tcp").open("here")
    _, region = device_memory(here, 1000, 1)
    assert here._regions.index.location(region.key) == "emulated:0"
    # The pinned memory that there is now is not looked at.
    assert here.stats().n_regions == 1
    assert here._regions.index.entries() == []


@pytest.mark.parametrize("op", ["read", "write"])
def test_host_and_device_memory_travel_in_one_transfer(make_world: Any, op: Any) -> None:
    world = make_world("cuda,shm,tcp")
    here, there = world.open("here"), world.open("there")
    size = 300_001
    near, near_region = device_memory(here, size, 1)
    far, far_region = device_memory(there, size, 2)
    local, remote = here.allocate(size), there.allocate(size)
    local.view[:], remote.view[:] = noise(size, 3), noise(size, 4)
    pieces = [
        Piece(near_region, 0, remote.region, 0, size),
        Piece(local.region, 0, far_region, 0, size),
    ]
    report = here.submit(op, pieces, PATIENCE_S, notify=b"both").result(PATIENCE_S)
    assert near.view == remote.view
    assert local.view == far.view
    assert set(report.path) == {"cuda", "shm"}
    assert there.notifications() == Notification("here", b"both")


def test_memory_that_can_not_be_exported_goes_over_the_wire(make_world: Any) -> None:
    world = make_world("cuda,tcp")
    here, there = world.open("here"), world.open("there")
    near, near_region = device_memory(here, 200_000, 1)
    far, far_region = device_memory(there, 200_000, 2, exportable=False)
    piece = Piece(near_region, 0, far_region, 0, 200_000)
    report = here.submit("write", [piece], PATIENCE_S).result(PATIENCE_S)
    assert report.path == ("tcp",)
    assert near.view == far.view


def test_read_only_device_memory_is_not_written(make_world: Any) -> None:
    for kind in ("tcp", "cuda", "memory"):
        world = make_world(kind)
        here, there = world.open("here"), world.open("there")
        buffer = EmulatedBuffer(1000)
        span = msgspec.structs.replace(buffer.span(), writable=False)
        local, region = here.allocate(1000), there.register(span)
        with pytest.raises(Rejected, match="read-only"):
            here.submit("write", [Piece(local.region, 0, region, 0, 10)]).result(PATIENCE_S)
        with pytest.raises(Rejected, match="read-only"):
            there.submit("read", [Piece(region, 0, local.region, 0, 10)]).result(PATIENCE_S)
        here.submit("read", [Piece(local.region, 0, region, 0, 1000)]).result(PATIENCE_S)


def test_an_opened_region_is_closed_when_it_is_taken_back(
    make_world: Any, eventually: Eventually
) -> None:
    world = make_world("cuda")
    here = world.open("here")
    world.on_device = "both"
    there = world.start("there", 1, 100_000)
    local = here.allocate(100_000)
    piece = Piece(local.region, 0, there.region, 0, 100_000)
    here.submit("read", [piece]).result(PATIENCE_S)
    opened = here._context.devices.device("emulated:0")
    assert isinstance(opened, EmulatedDevice)
    assert opened.n_opened == 1
    assert here.stats().n_mappings == 1
    there.ask("unregister")
    with pytest.raises(Rejected, match="no region of this key"):
        here.submit("read", [piece]).result(PATIENCE_S)
    eventually(lambda: opened.n_opened == 0)
    assert here.stats().n_mappings == 0


def test_a_device_that_fails_under_its_owner_rejects_the_peers_transfer(make_world: Any) -> None:
    for kind in ("tcp", "memory", "cuda"):
        world = make_world(kind)
        here, there = world.open("here"), world.open("there")
        # What lies beyond the allocation is no device memory: each copy fails.
        buffer = EmulatedBuffer(1000)
        gone = DeviceSpan("emulated:0", buffer.address + 500, 1000, owner=buffer)
        local, region = here.allocate(1000), there.register(gone)
        for op in ("read", "write"):
            with pytest.raises(Rejected, match=r"in device memory: the driver says error|mapped"):
                here.submit(op, [Piece(local.region, 0, region, 0, 1000)]).result(PATIENCE_S)


def test_pinned_memory_is_bounded_and_all_given_back(make_world: Any, eventually: Any) -> None:
    world = make_world("tcp")
    settings = TransferSettings(
        staging_bytes=256 * KIB, staging_part_bytes=64 * KIB, slice_bytes=50_000, lanes=4
    )
    here, there = world.open("here", settings=settings), world.open("there", settings=settings)
    near, near_region = device_memory(here, 4_000_000, 1)
    far, far_region = device_memory(there, 4_000_000, 2)
    pieces = [
        Piece(near_region, at, far_region, at, 100_000) for at in range(0, 4_000_000, 100_000)
    ]
    transfers = [here.submit("write", [piece], PATIENCE_S) for piece in pieces]
    for transfer in transfers:
        transfer.result(PATIENCE_S)
    assert near.view == far.view
    for engine in (here, there):
        pools = engine._context.devices
        # An owner acknowledges a write just before it gives its buffer back.
        eventually(lambda pools=pools: set(pools.free_bytes.values()) == {(256 * KIB, 256 * KIB)})


def test_closing_an_engine_lets_go_of_device_memory(make_world: Any) -> None:
    world = make_world("cuda,tcp")
    here = world.open("here")
    buffer, region = device_memory(here, 1000, 1)
    other, _ = device_memory(here, 1000, 2)
    alive = [weakref.ref(buffer), weakref.ref(other)]
    del buffer, other
    gc.collect()
    assert None not in [each() for each in alive]
    here.unregister(region)
    with pytest.raises(Rejected, match="register it first"):
        here.submit("write", [Piece(region, 0, region, 0, 1)]).result(PATIENCE_S)
    here.close()
    assert here._context.devices.free_bytes == {}
    gc.collect()
    assert [each() for each in alive] == [None, None]
