"""Manage memory for blocks on their way between vLLM's cache and kvstores.

    page:  free ──take──▶ used by one load or one store ──give_back──▶ free

A page has the bytes of one block in the canonical layout. Stores never take the last quarter, so
that a burst of them does not keep requests waiting for their blocks.
"""

import threading

import torch

from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_transfer.regions.region_table import Memory
from halfmoon_vllm.head_rows import HeadRows

#: Share of the pages that only loads may take.
_FOR_LOADS = 0.25


class BlockStaging:
    """Pages of registered memory. All methods are safe from any thread."""

    def __init__(self, memory: Memory, layout: KvLayout) -> None:
        self.memory = memory
        self.layout = layout
        self.rows = HeadRows(memory.view, layout, 0, layout.n_kv_heads)
        self.n_pages = self.rows.n_pages
        self._kept = min(self.n_pages - 1, int(_FOR_LOADS * self.n_pages))
        self._lock = threading.Lock()
        self._free = list(range(self.n_pages))

    @property
    def n_free(self) -> int:
        """Pages that nothing uses."""
        with self._lock:
            return len(self._free)

    def take_for_store(self) -> int | None:
        """Take a page; None: there is none for stores."""
        with self._lock:
            return self._free.pop() if len(self._free) > self._kept else None

    def take_for_load(self, most: int) -> list[int]:
        """Take as many pages as there are, up to `most`; perhaps none."""
        with self._lock:
            n = min(most, len(self._free))
            taken = self._free[len(self._free) - n :]
            del self._free[len(self._free) - n :]
            return taken

    def give_back(self, pages: list[int]) -> None:
        """Free pages that nothing reads or writes any more."""
        with self._lock:
            self._free += pages

    def base_rows(self, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows of slots of pages in `rows`: those of keys of layer 0."""
        return pages * (self.layout.n_layers * 2 * self.layout.block_size) + slots

    def check(self) -> None:
        """Check that no page is free twice."""
        with self._lock:
            assert len(set(self._free)) == len(self._free) <= self.n_pages
