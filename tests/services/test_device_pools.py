"""Pools in memory of a device: KV goes there and comes from there without a mirror on the host."""

from collections.abc import Callable
from typing import Any

import pytest

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_transfer.devices.device_spans import DeviceSpan
from halfmoon_transfer.devices.emulated_device import EmulatedBuffer

PROMPT = [(7 * i) % 900 for i in range(300)]


class DeviceEngine(FakeEngine):
    """A fake engine whose kernels compute on an emulated device."""

    def allocate_pool(self, n_bytes: int) -> DeviceSpan:
        buffer = EmulatedBuffer(n_bytes)
        self.attach(buffer.view)
        return buffer.span()


@pytest.mark.parametrize("backends", [("memory",), ("tcp",)])
async def test_requests_go_through_pools_on_devices(
    backends: tuple[str, ...], local_cluster: Callable[..., Any]
) -> None:
    expected = FakeEngine().expected(PROMPT, 20)
    async with local_cluster(DeviceEngine, backends=backends, n_pages=64) as cluster:
        for name in ("prefill-0", "decode-0"):
            assert not isinstance(cluster.memories[name].view, memoryview)
        assert await cluster.generate(PROMPT, 20) == expected
        # Blocks went from the device to the kvstore, and come back with checksums of its bytes.
        await cluster.settled()
        assert await cluster.n_cached(PROMPT) == len(PROMPT) // 16 * 16
        assert await cluster.generate(PROMPT, 20) == expected


async def test_prefill_on_a_device_fills_a_pool_on_a_host(
    local_cluster: Callable[..., Any],
) -> None:
    engines = iter([DeviceEngine(), FakeEngine()])
    async with local_cluster(lambda: next(engines)) as cluster:
        assert isinstance(cluster.memories["decode-0"].view, memoryview)
        assert await cluster.generate(PROMPT, 20) == FakeEngine().expected(PROMPT, 20)


def test_a_view_of_a_device_copies_slices() -> None:
    from halfmoon_metadata.stores.memory_store import MemoryStore
    from halfmoon_transfer.engine import TransferEngine

    buffer = EmulatedBuffer(1000)
    buffer.view[:] = bytes(i % 251 for i in range(1000))
    with TransferEngine.open("here", metadata=MemoryStore(), backends=("memory",)) as transfer:
        memory = transfer.register_device(buffer.span(100, 500))
        assert len(memory.view) == memory.region.length == 500
        assert bytes(memory.view[3:400]) == bytes(buffer.view[103:500])
        assert bytes(memory.view[490:900]) == bytes(buffer.view[590:600])
        assert bytes(memory.view[5:5]) == b""
        with pytest.raises(ValueError, match="no steps"):
            memory.view[::2]
        with pytest.raises(ValueError, match="the host's"):
            transfer.register_device(bytearray(5))  # type: ignore[arg-type]
