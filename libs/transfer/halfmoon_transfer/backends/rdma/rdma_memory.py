"""Which of our regions the devices know, registered at all of them when first needed.

A region may be registered twice, as each registration gives a right of its own:

    lent      to peers that presented its key: they hold rkeys, read and write it by
              themselves, and lose that at once when the region is taken back
    borrowed  by our own transfers, as their source or destination: unknown to peers, and
              kept until the last transfer that uses it has ended

Memory of a device (`devices`) is lent as a dma-buf, where its driver exports one and all network
cards take it: they then reach it without the host (GPUDirect). It is never borrowed: our own
transfers stage it. Where that can't be, peers are refused, and take their next path.

The lock is held while registering, and a region is looked up under it: one that is being
taken back is either found here and withdrawn, or not found by whoever asks for it.
"""

import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import numpy as np

from halfmoon_protocol.regions import Region
from halfmoon_transfer.backends.rdma.rdma_device import RdmaDevice
from halfmoon_transfer.backends.rdma.rdma_handshake import SLOT_BYTES, RdmaRegionGrant
from halfmoon_transfer.backends.rdma.verbs import MemoryRegistration, VerbsError
from halfmoon_transfer.devices.device_interface import DeviceError
from halfmoon_transfer.devices.device_region import DeviceRegion
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.regions.region_index import RegionEntry
from halfmoon_transfer.regions.region_table import RegionTable

_log = logging.getLogger(__name__)


class RegionRegistrations:
    """One region at all devices."""

    def __init__(
        self,
        address: int,
        length: int,
        devices: Iterable[RdmaDevice],
        register: Callable[[RdmaDevice], MemoryRegistration],
        *,
        writable: bool,
    ) -> None:
        """Register it everywhere, or nowhere.

        Args:
            address: of its first byte, as cards are told it.
            length: in bytes.
            devices: all cards.
            register: does it at one of them, and keeps the memory alive.
            writable: whether bytes may be written.
        """
        self.address, self.length, self.writable = address, length, writable
        self.by_device: dict[str, MemoryRegistration] = {}
        #: Transfers that use it now; `withdrawn`: the last of them closes it.
        self.n_users = 0
        self.withdrawn = False
        self._register = register
        try:
            for device in devices:
                self.by_device[device.name] = register(device)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """The devices refuse it from now on."""
        for name, registration in self.by_device.items():
            try:
                registration.close()
            except VerbsError as error:
                _log.error("device %s keeps memory registered: %s", name, error)
        self.by_device = {}


def register_host_memory(
    view: memoryview, devices: Iterable[RdmaDevice], *, remote: bool
) -> RegionRegistrations:
    """Bytes of this process, at all devices.

    Raises:
        VerbsError: they can't be registered.
    """
    # Keeps the memory alive, in `register`: the devices hold bare addresses.
    array = np.frombuffer(view, np.uint8)
    address, length, writable = int(array.ctypes.data), len(array), not view.readonly

    def register(device: RdmaDevice) -> MemoryRegistration:
        return device.context.register(
            int(array.ctypes.data), length, writable=writable, remote=remote
        )

    return RegionRegistrations(address, length, devices, register, writable=writable)


def register_device_memory(
    region: DeviceRegion, devices: Iterable[RdmaDevice]
) -> RegionRegistrations:
    """Memory of a device, at all network cards, for peers.

    Raises:
        DeviceError: its driver exports no dma-buf.
        VerbsError: a card, or its driver, does not take it.
    """
    exported = region.dma_buf()

    def register(device: RdmaDevice) -> MemoryRegistration:
        return device.context.register_dma_buf(
            exported.fd, exported.offset, region.length, writable=region.writable
        )

    try:
        # A dma-buf has no address of its own: cards are told offsets in it.
        return RegionRegistrations(
            exported.offset, region.length, devices, register, writable=region.writable
        )
    finally:
        os.close(exported.fd)


class NotificationBuffer:
    """A little memory of our own that one device may read from: a notice on its way out."""

    def __init__(self, device: RdmaDevice) -> None:
        """Register it.

        Raises:
            VerbsError: it can't be registered.
        """
        self._array = np.zeros(SLOT_BYTES, np.uint8)
        self._address = int(self._array.ctypes.data)
        self._registration = device.context.register(
            self._address, SLOT_BYTES, writable=False, remote=False
        )

    def lay(self, body: bytes) -> tuple[int, int]:
        """Put bytes there; the address and lkey. What was there before must have been sent."""
        self._array[: len(body)] = np.frombuffer(body, np.uint8)
        return self._address, self._registration.lkey

    def close(self) -> None:
        """The device leaves it alone from now on."""
        self._registration.close()


class RdmaMemoryTable:
    """All that is registered."""

    def __init__(self, regions: RegionTable, devices: dict[str, RdmaDevice]) -> None:
        self._regions = regions
        self._devices = devices
        self._lock = threading.Lock()
        #: By region key.
        self._lent: dict[bytes, RegionRegistrations] = {}
        self._borrowed: dict[bytes, RegionRegistrations] = {}

    def lend(self, generation: int, key: bytes) -> RdmaRegionGrant:
        """A region for a peer that knows its key.

        Raises:
            Refused: there is no such region.
            VerbsError: it can't be registered.
        """
        with self._lock:
            lent = self._find(self._lent, generation, key, remote=True)
            rkeys = {name: each.rkey for name, each in lent.by_device.items()}
            return RdmaRegionGrant(lent.address, lent.length, lent.writable, rkeys)

    @contextmanager
    def borrow(self, regions: Iterable[Region]) -> Generator[dict[bytes, RegionRegistrations]]:
        """Regions of ours for a transfer, by key, while the block runs.

        Raises:
            Refused: one of them is not ours (any more).
            VerbsError: one of them can't be registered.
        """
        held: dict[bytes, RegionRegistrations] = {}
        try:
            with self._lock:
                for region in regions:
                    found = self._find(self._borrowed, region.generation, region.key, remote=False)
                    if region.key not in held:
                        found.n_users += 1
                        held[region.key] = found
            yield held
        finally:
            with self._lock:
                for each in held.values():
                    each.n_users -= 1
                    if each.withdrawn and each.n_users == 0:
                        each.close()

    def revoke(self, key: bytes) -> None:
        """The region was removed: peers' accesses end now, our own with their transfers."""
        with self._lock:
            lent = self._lent.pop(key, None)
            if lent is not None:
                lent.close()
            borrowed = self._borrowed.pop(key, None)
            if borrowed is not None:
                borrowed.withdrawn = True
                if borrowed.n_users == 0:
                    borrowed.close()

    def close(self) -> None:
        """Nobody uses any of it."""
        with self._lock:
            for each in [*self._lent.values(), *self._borrowed.values()]:
                each.close()
            self._lent.clear()
            self._borrowed.clear()

    def _find(
        self, table: dict[bytes, RegionRegistrations], generation: int, key: bytes, *, remote: bool
    ) -> RegionRegistrations:
        # Asked each time: what was removed must not be handed out again.
        entry, _ = self._regions.leases.acquire(generation, key, 0, 0, write=False)
        try:
            known = table.get(key)
            if known is None:
                known = table[key] = self._register(entry, remote=remote)
            return known
        finally:
            self._regions.leases.release(entry)

    def _register(self, entry: RegionEntry, *, remote: bool) -> RegionRegistrations:
        devices = self._devices.values()
        if entry.backing is None:
            return register_host_memory(entry.view, devices, remote=remote)
        if not remote or not isinstance(entry.backing, DeviceRegion):
            raise AccessRefused(AccessStatus.NOT_SHAREABLE)  # no card can read a file by itself
        try:
            return register_device_memory(entry.backing, devices)
        except (DeviceError, VerbsError) as error:
            _log.debug("device memory is not lent over rdma: %s", error)
            raise AccessRefused(AccessStatus.NOT_SHAREABLE) from error
