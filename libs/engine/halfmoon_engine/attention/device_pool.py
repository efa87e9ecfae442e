"""Mirror the attached host memory in a pool on an accelerator.

Transfers read and write host memory; attention reads the device. So computed rows are copied to the
host, and pages are copied from the host before a layer reads them. A run with `Run.continues` needs
no copy from the host: only the engine has written its pages.

    others ──write──▶ host page ──fetch(layer)──▶ device page ──read──▶ attention
                      host row  ◀──write(layer)── device row

The device holds as many pages as the attached memory does.
"""

import torch

from halfmoon_engine.attention.kv_pool import GatherBuffer, HostKvPool, write_rows
from halfmoon_models.pool_size import PoolRoom
from halfmoon_protocol.kv_layout import KvLayout


def device_room(device: torch.device, n_host_copies: int = 1) -> PoolRoom:
    """Return the room for a pool on a CUDA device, once the model's weights are there."""
    free, total = torch.cuda.mem_get_info(device)
    return PoolRoom(n_host_copies, free, total, torch.cuda.memory_reserved(device))


class DeviceKvPool:
    """Rows on the device in the order of the host's, and the pool of the host."""

    def __init__(self, memory: memoryview, layout: KvLayout, device: torch.device) -> None:
        self._host = HostKvPool(memory, layout)
        self.n_pages = self._host.n_pages
        self._layout = layout
        self._rows = torch.zeros_like(self._host.rows, device=device)
        #: [page, layer, rows of keys and values, width], of host and device.
        shape = (self.n_pages, layout.n_layers, 2 * layout.block_size, -1)
        self._host_pages = self._host.rows.view(shape)
        self._device_pages = self._rows.view(shape)
        self._scratch = GatherBuffer(self._rows)

    def fetch(self, layer: int, pages: torch.Tensor) -> None:
        """Copy one layer of these pages from the host."""
        landed = self._host_pages[:, layer].index_select(0, pages.cpu())
        self._device_pages[:, layer].index_copy_(
            0, pages.to(self._rows.device), landed.to(self._rows.device)
        )

    def write(
        self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store on the device and on the host; return when both have the rows."""
        write_rows(self._rows, self._layout, layer, rows, keys, values)
        self._host.write(layer, rows.cpu(), keys.cpu(), values.cpu())

    def read(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy keys and values into scratch memory on the device."""
        return self._scratch.gather(self._rows, self._layout, layer, rows)
