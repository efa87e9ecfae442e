"""Register our regions at all RDMA devices when they are first needed.

A region may be registered twice, as each registration gives a right of its own:

    lent      to peers that presented its key: they hold rkeys, read and write it by
              themselves, and lose that at once when the region is removed
    borrowed  by our own transfers, as their source or destination: unknown to peers, and
              kept until the last transfer that uses it has ended

Memory of a device (`devices`) is lent as a dma-buf, if its driver exports one and all NICs accept
it. They then access it without the host (GPUDirect). Otherwise peers are refused, and take their
next path. It is never borrowed: our own transfers stage it.

The lock is held while registering, and a region is looked up under it. So a region that is being
removed is either found here and withdrawn, or refused to the peer that requests it.
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
    """The registrations of one region at all devices."""

    def __init__(
        self,
        address: int,
        length: int,
        devices: Iterable[RdmaDevice],
        register: Callable[[RdmaDevice], MemoryRegistration],
        *,
        writable: bool,
    ) -> None:
        """Register the region at all devices, or at none.

        Args:
            address: of its first byte, in the address space of the NICs.
            length: in bytes.
            devices: all devices.
            register: registers it at one device, and keeps the memory alive.
            writable: whether bytes may be written.
        """
        self.address, self.length, self.writable = address, length, writable
        self.by_device: dict[str, MemoryRegistration] = {}
        #: Transfers that use it now; once it is `withdrawn`, the last of them closes it.
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
        """End the registrations: the devices refuse accesses from now on."""
        for name, registration in self.by_device.items():
            try:
                registration.close()
            except VerbsError as error:
                _log.error("device %s keeps memory registered: %s", name, error)
        self.by_device = {}


def register_host_memory(
    view: memoryview, devices: Iterable[RdmaDevice], *, remote: bool
) -> RegionRegistrations:
    """Register memory of this process at all devices.

    Raises:
        VerbsError: it can't be registered.
    """
    # `register` refers to it and keeps the memory alive: the devices hold bare addresses.
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
    """Register memory of a device at all NICs, for peers.

    Raises:
        DeviceError: its driver exports no dma-buf.
        VerbsError: a NIC, or its driver, does not accept it.
    """
    exported = region.dma_buf()

    def register(device: RdmaDevice) -> MemoryRegistration:
        return device.context.register_dma_buf(
            exported.fd, exported.offset, region.length, writable=region.writable
        )

    try:
        # A dma-buf has no address of its own: NICs use offsets in it.
        return RegionRegistrations(
            exported.offset, region.length, devices, register, writable=region.writable
        )
    finally:
        os.close(exported.fd)


class NotificationBuffer:
    """A small buffer from which one device sends notifications."""

    def __init__(self, device: RdmaDevice) -> None:
        """Allocate and register the buffer.

        Raises:
            VerbsError: it can't be registered.
        """
        self._array = np.zeros(SLOT_BYTES, np.uint8)
        self._address = int(self._array.ctypes.data)
        self._registration = device.context.register(
            self._address, SLOT_BYTES, writable=False, remote=False
        )

    def lay(self, body: bytes) -> tuple[int, int]:
        """Put bytes into the buffer and return address and lkey; the previous ones were sent."""
        self._array[: len(body)] = np.frombuffer(body, np.uint8)
        return self._address, self._registration.lkey

    def close(self) -> None:
        """End the registration."""
        self._registration.close()


class RdmaMemoryTable:
    """The registrations of all regions. Methods are safe from any thread."""

    def __init__(self, regions: RegionTable, devices: dict[str, RdmaDevice]) -> None:
        self._regions = regions
        self._devices = devices
        self._lock = threading.Lock()
        #: By region key.
        self._lent: dict[bytes, RegionRegistrations] = {}
        self._borrowed: dict[bytes, RegionRegistrations] = {}

    def lend(self, generation: int, key: bytes) -> RdmaRegionGrant:
        """Grant a region to a peer that knows its key.

        Raises:
            AccessRefused: there is no such region.
            VerbsError: it can't be registered.
        """
        with self._lock:
            lent = self._find(self._lent, generation, key, remote=True)
            rkeys = {name: each.rkey for name, each in lent.by_device.items()}
            return RdmaRegionGrant(lent.address, lent.length, lent.writable, rkeys)

    @contextmanager
    def borrow(self, regions: Iterable[Region]) -> Generator[dict[bytes, RegionRegistrations]]:
        """Lend our regions to a transfer while the block runs; yields them by key.

        Raises:
            AccessRefused: one of them is not registered here (any more).
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
        """Withdraw a removed region: peers' accesses end now, our own with their transfers."""
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
        """End all registrations; no transfer uses them."""
        with self._lock:
            for each in [*self._lent.values(), *self._borrowed.values()]:
                each.close()
            self._lent.clear()
            self._borrowed.clear()

    def _find(
        self, table: dict[bytes, RegionRegistrations], generation: int, key: bytes, *, remote: bool
    ) -> RegionRegistrations:
        # Checked each time: a removed region must not be granted again.
        entry, _ = self._regions.leases.acquire(generation, key, 0, 0, write=False)
        try:
            if entry.grant is not None:
                # A NIC's key covers whole regions: the bytes go by a path that checks each access.
                raise AccessRefused(AccessStatus.NOT_SHAREABLE)
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
            raise AccessRefused(AccessStatus.NOT_SHAREABLE)  # no NIC can read a file by itself
        try:
            return register_device_memory(entry.backing, devices)
        except (DeviceError, VerbsError) as error:
            _log.debug("device memory is not lent over rdma: %s", error)
            raise AccessRefused(AccessStatus.NOT_SHAREABLE) from error
