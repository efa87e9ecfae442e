"""Compute the checksums of fetched blocks while they arrive, layer by layer, in one thread.

    layer 0 here ──▶ layer 1 here ──▶ … ──▶ last layer here
         │               │                       │
         ▼               ▼                       ▼
      its bytes       its bytes              its bytes ──▶ checksums
      of all blocks

A block's checksum covers its layers in order, so each layer's bytes are added once they are here.
This runs beside the reads of later layers and beside the forward pass: xxhash gives up the
interpreter's lock. When the forward is over, little is left to do.
"""

from collections.abc import Generator, Sequence
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import suppress

import xxhash

from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_transfer.interface import Transfer
from halfmoon_transfer.regions.region_table import SlicedBytes
from halfmoon_transfer.threads.future_await import await_future


class ArrivingChecksums:
    """The checksums of one request's fetched blocks."""

    def __init__(
        self, view: SlicedBytes, layout: KvLayout, pages: Sequence[int], thread: Executor
    ) -> None:
        """Start without any layer.

        Args:
            view: of the pool.
            layout: of a page.
            pages: of the blocks, in prefix order; not written to while layers are added.
            thread: has one thread, so that it runs what it is given in order.
        """
        self._view = view
        self._layer_bytes = layout.layer_bytes
        self._starts = [page * layout.block_bytes for page in pages]
        self._n_layers = layout.n_layers
        self._thread = thread
        #: Layers that are here, and, changed by the thread alone, those that are added.
        self._n_here = 0
        self._n_added = 0
        self._states = [xxhash.xxh3_64() for _ in pages]
        self._result: Future[tuple[int, ...]] = Future()

    def on_layer(self, layer: Transfer) -> None:
        """Add the next layer, which is here unless its read failed; called in layer order."""
        try:
            layer.result(0)
            self._n_here += 1
            self._thread.submit(self._add_layers)
        except Exception as error:  # its read failed, or the worker is closing
            self._fail(error)

    def __await__(self) -> Generator[object, None, tuple[int, ...]]:
        """Return xxh3-64 of each block once all layers are added.

        Raises:
            Exception: of the layer that could not be added.
        """
        return await_future(self._result)

    def _add_layers(self) -> None:
        """Add all layers that are here, of all blocks; in the thread.

        Each call into xxhash takes the interpreter's lock once, so several layers are one run.
        """
        n_here = self._n_here
        if self._result.done() or n_here == self._n_added:
            return  # a layer failed, or these were added together with one before
        try:
            first, last = self._n_added * self._layer_bytes, n_here * self._layer_bytes
            for state, start in zip(self._states, self._starts, strict=True):
                state.update(self._view[start + first : start + last])
            self._n_added = n_here
            if n_here == self._n_layers:
                self._result.set_result(tuple(state.intdigest() for state in self._states))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Let the first error count; in any thread."""
        with suppress(InvalidStateError):
            self._result.set_exception(error)
