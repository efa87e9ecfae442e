"""Carry batches whose local bytes are in device memory."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from halfmoon_transfer.backends.backend_interface import Backend, CarryRequest
from halfmoon_transfer.backends.device_staging import carry_staged
from halfmoon_transfer.devices.device_table import DeviceTable
from halfmoon_transfer.devices.local_region import LocalRegion
from halfmoon_transfer.planning.transfer_plan import Batch, SliceOutcome
from halfmoon_transfer.regions.region_table import RegionTable
from halfmoon_transfer.settings import TransferSettings


@runtime_checkable
class SupportsDeviceMemory(Protocol):
    """A backend that reaches device memory by itself, also on the local side."""

    def carry_direct(
        self, request: CarryRequest, locals_: dict[bytes, LocalRegion], /
    ) -> Sequence[SliceOutcome]:
        """Carry like `Backend.carry`; `locals_` says where local bytes are, by region key."""
        ...


class DeviceCarry:
    """Carries a batch directly, if its backend can, or staged through pinned memory."""

    def __init__(
        self, regions: RegionTable, devices: DeviceTable, settings: TransferSettings
    ) -> None:
        self._regions = regions
        self._devices = devices
        # Two parts of a batch are in pinned memory at once.
        self._part_bytes = max(1, min(settings.staging_part_bytes, settings.staging_bytes // 3))

    def is_needed(self, batch: Batch) -> bool:
        """Return whether any local region of a batch is device memory."""
        return self._devices.any_open and any(
            self._regions.backed.is_stageable(each.local.key) for each in batch.slices
        )

    def carry(self, request: CarryRequest, backend: Backend) -> Sequence[SliceOutcome]:
        """Carry a batch for which `is_needed` is true.

        Raises:
            AccessRefused: a local region was unregistered meanwhile.
        """
        regions = {each.local.key: each.local for each in request.batch.slices}.values()
        with self._regions.leases.lease_regions(regions) as entries:
            locals_ = {entry.region.key: self._devices.local_region(entry) for entry in entries}
            if isinstance(backend, SupportsDeviceMemory):
                return backend.carry_direct(request, locals_)
            return carry_staged(request, locals_, backend.carry, self._part_bytes)
