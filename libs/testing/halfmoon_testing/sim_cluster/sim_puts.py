"""Put blocks into several kvstores, and look later whether acknowledged puts are there.

A put counts as acknowledged when each of its R replicas has committed it. It must be served as
long as one of these replicas lives. Kvstores have room for all blocks of the runs that look.
"""

import asyncio
import random
from dataclasses import dataclass

import xxhash

from halfmoon_prefix_cache.block_put import BlockPutter, BlockRun
from halfmoon_prefix_cache.replica_selector import ReplicaSelector
from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.messages import KvstoreAddress
from halfmoon_runtime.kvstore_clients import KvstoreClients, KvstoreUnavailable
from halfmoon_testing.sim_cluster.sim_services import SimService, SimWorld, fake_layout
from halfmoon_testing.sim_cluster.sim_shape import BLOCK_SIZE, RECOVERY_OF_RECORDS_S
from halfmoon_testing.sim_cluster.violation import Violation
from halfmoon_transfer.interface import Piece, TransferError

#: Replicas of a put, where there are so many kvstores.
_REPLICAS = 2
_BLOCKS = 2
_TRY_S = 0.1
_PUT_S = 3.0


@dataclass(frozen=True)
class AcknowledgedPut:
    """Blocks that all their replicas have committed."""

    hashes: tuple[BlockHash, ...]
    content: bytes
    replicas: tuple[SimService, ...]


class SimPuts(SimService):
    """A process that puts blocks; no fault meets it but those of the network."""

    def __init__(
        self, world: SimWorld, services: dict[str, SimService], dice: random.Random
    ) -> None:
        """Put nothing yet.

        Args:
            world: of the run.
            services: of the cluster, by name.
            dice: draws when puts begin, and their bytes.
        """
        super().__init__(world, "puts-0", "puts")
        self._services = services
        self._dice = dice
        self.acknowledged: list[AcknowledgedPut] = []

    async def run(self, n_puts: int) -> None:
        """Put blocks, one put after another."""
        transfer = (await self._open_env("prefill")).transfer
        layout = fake_layout()
        self._memory = transfer.allocate(_BLOCKS * layout.block_bytes)
        self._kvstores = KvstoreClients(self.network, 1.0)
        replicas = ReplicaSelector(self._kvstores, layout, self.clock)
        self._putter = BlockPutter(replicas, transfer, self._memory, layout)
        for number in range(n_puts):
            await asyncio.sleep(self._dice.uniform(0.0, 0.8))
            await self._put(number)

    async def _put(self, number: int) -> None:
        names = [name for name in self._services if name.startswith("kvstore")]
        replicas = [self._services[name] for name in self._dice.sample(names, len(names))]
        replicas = replicas[:_REPLICAS]
        content = self._dice.randbytes(len(self._memory.view))
        self._memory.view[:] = content
        first = BlockHash(b"put" + number.to_bytes(12, "big") + b"0")
        run = BlockRun((first, BlockHash(first[:-1] + b"1")), None, (0,) * _BLOCKS * BLOCK_SIZE, "")
        try:
            for replica in replicas:
                address = _address(replica)
                if address is None:
                    return
                if await self._putter.put(address, run, range(_BLOCKS), _PUT_S, []):
                    return
        except (KvstoreUnavailable, TransferError):
            return
        if not any(replica.process.is_dead for replica in replicas):
            self.acknowledged.append(AcknowledgedPut(run.hashes, content, tuple(replicas)))
            self.world.network.log(self.name, f"put {number} is acknowledged")

    async def check(self) -> None:
        """Read all acknowledged puts of which a replica lives.

        Raises:
            Violation: one is not there, or other bytes are.
        """
        for put in self.acknowledged:
            living = [each for each in put.replicas if not each.process.is_dead]
            if living and not await self._is_there(put, living):
                names = ", ".join(each.name for each in living)
                raise Violation(
                    "acknowledged puts live", f"{put.hashes[0]!r} is not there any more: {names}"
                )

    async def _is_there(self, put: AcknowledgedPut, living: list[SimService]) -> bool:
        for _ in range(round(RECOVERY_OF_RECORDS_S / _TRY_S)):
            for replica in living:
                if await self._read(put, replica):
                    return True
            await asyncio.sleep(_TRY_S)
        return False

    async def _read(self, put: AcknowledgedPut, replica: SimService) -> bool:
        address = _address(replica)
        assert address is not None and self.transfer is not None
        layout = fake_layout()
        try:
            kvstore = await self._kvstores.client_for(address)
            lease = await kvstore.lease(layout, put.hashes)
            async with kvstore.hold_lease(lease):
                if len(lease.places) < _BLOCKS:
                    return False
                size, region = layout.block_bytes, self._memory.region
                pieces = [
                    Piece(region, i * size, lease.region, place.offset, size)
                    for i, place in enumerate(lease.places)
                ]
                await self.transfer.submit("read", pieces)
        except (KvstoreUnavailable, TransferError):
            return False
        for i, place in enumerate(lease.places):
            block = self._memory.view[i * size : (i + 1) * size]
            if xxhash.xxh3_64_intdigest(block) == place.checksum and block == bytes(
                put.content[i * size : (i + 1) * size]
            ):
                continue
            raise Violation("acknowledged puts live", f"{place.hash!r} has other bytes")
        return True


def _address(service: SimService) -> KvstoreAddress | None:
    if service.worker is None or service.process.is_dead:
        return None
    info = service.worker.info
    return KvstoreAddress(info.worker_id, info.generation, info.commands)
