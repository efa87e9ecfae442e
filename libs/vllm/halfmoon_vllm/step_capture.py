"""Copy the keys and values of blocks to be stored on their way into vLLM's cache.

A block is open from the step in which its computation begins until all of its slots were written
in all layers. Then its page has all of its bytes, and is handed on. A block of a request that ends
or is preempted before that is dropped.

All methods run in the thread of vLLM's worker.
"""

from dataclasses import dataclass

import torch

from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.messages import KvstoreAddress
from halfmoon_vllm.block_staging import BlockStaging
from halfmoon_vllm.connector_counts import ConnectorCounts
from halfmoon_vllm.step_orders import StoreOrder


@dataclass(frozen=True)
class CapturedBlocks:
    """Blocks of one request whose bytes are in staging pages, to be stored."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    home: KvstoreAddress


@dataclass
class _OpenBlock:
    order: StoreOrder
    #: Number of the block in the order.
    number: int
    page: int


@dataclass
class _Rows:
    """Rows of the present step that belong to open blocks."""

    #: Of the step's tokens.
    tokens: torch.Tensor
    #: Where they go in the staging pages.
    base: torch.Tensor
    pages: torch.Tensor
    slots: torch.Tensor


class StepCapture:
    """The open blocks of all requests."""

    def __init__(self, staging: BlockStaging, n_layers: int, counts: ConnectorCounts) -> None:
        self._staging = staging
        self._n_layers = n_layers
        #: By place in vLLM's cache.
        self._open: dict[int, _OpenBlock] = {}
        #: Page of each place; -1: not open. Grows with the largest place.
        self._page_of = torch.full((0,), -1, dtype=torch.int64)
        self._filled = torch.zeros((staging.n_pages, staging.layout.block_size), dtype=torch.bool)
        #: Requests of which a block found no page: those behind it are of no use.
        self._cut_off: set[str] = set()
        self._rows: _Rows | None = None
        self._layers_seen: list[int] = [0] * n_layers
        self._counts = counts

    def begin_step(self, orders: tuple[StoreOrder, ...], dropped: tuple[str, ...]) -> None:
        """Drop the blocks of ended requests and open those of the orders."""
        self._cut_off.difference_update(dropped)
        if dropped and self._open:
            ended = set(dropped)
            gone = [p for p, block in self._open.items() if block.order.request_id in ended]
            self._drop(gone, "request_ended")
        for order in orders:
            self._open_blocks(order)
        self._rows = None
        self._layers_seen = [0] * self._n_layers

    def on_layer(
        self, index: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Copy those rows of a layer that belong to open blocks."""
        if not self._open:
            return
        rows = self._rows
        if rows is None:
            rows = self._rows = self._select(slots)
        self._layers_seen[index] += 1
        if len(rows.tokens):
            tokens = rows.tokens.to(key.device)
            # On the CPU these copies are the only ones; of a device they come to the host.
            keys, values = key[tokens].cpu(), value[tokens].cpu()
            self._staging.rows.write(index, rows.base, keys, values)

    def end_step(self) -> list[CapturedBlocks]:
        """Return the blocks that are complete."""
        rows, self._rows = self._rows, None
        if rows is None or not len(rows.tokens):
            return []
        if self._layers_seen != [1] * self._n_layers:
            # Rows of some layer did not pass, or passed twice: these bytes prove nothing.
            touched = set(rows.pages.tolist())
            self._drop([p for p, b in self._open.items() if b.page in touched], "layers_differ")
            return []
        self._filled[rows.pages, rows.slots] = True
        return self._take_complete(set(rows.pages.tolist()))

    def _take_complete(self, touched: set[int]) -> list[CapturedBlocks]:
        done: dict[int, tuple[StoreOrder, list[_OpenBlock]]] = {}
        for place, block in list(self._open.items()):
            if block.page in touched and bool(self._filled[block.page].all()):
                del self._open[place]
                self._page_of[place] = -1
                done.setdefault(id(block.order), (block.order, []))[1].append(block)
        return [
            captured for order, blocks in done.values() for captured in self._runs(order, blocks)
        ]

    def _runs(self, order: StoreOrder, blocks: list[_OpenBlock]) -> list[CapturedBlocks]:
        """Return complete blocks of an order in runs without gaps."""
        size = self._staging.layout.block_size
        runs: list[list[_OpenBlock]] = []
        for block in sorted(blocks, key=lambda block: block.number):
            if runs and runs[-1][-1].number + 1 == block.number:
                runs[-1].append(block)
            else:
                runs.append([block])
        return [
            CapturedBlocks(
                order.hashes[run[0].number : run[-1].number + 1],
                order.hashes[run[0].number - 1] if run[0].number else order.parent,
                order.token_ids[run[0].number * size : (run[-1].number + 1) * size],
                tuple(block.page for block in run),
                order.home,
            )
            for run in runs
        ]

    def _open_blocks(self, order: StoreOrder) -> None:
        for number, place in enumerate(order.places):
            cut_off = order.request_id in self._cut_off
            page = None if cut_off else self._staging.take_for_store()
            if page is None:
                self._cut_off.add(order.request_id)
                self._counts.add("blocks_not_stored", len(order.places) - number, "staging_full")
                return
            if place in self._open:  # its request ended, and nothing said so
                self._drop([place], "request_ended")
            if place >= len(self._page_of):
                more = torch.full((place + 1 - len(self._page_of),), -1, dtype=torch.int64)
                self._page_of = torch.cat((self._page_of, more))
            self._page_of[place] = page
            self._filled[page] = False
            self._open[place] = _OpenBlock(order, number, page)

    def _select(self, slots: torch.Tensor) -> _Rows:
        size = self._staging.layout.block_size
        slots = slots.to("cpu", torch.int64)
        places = slots.div(size, rounding_mode="floor")
        inside = (places >= 0) & (places < len(self._page_of))
        pages = torch.full_like(places, -1)
        pages[inside] = self._page_of[places[inside]]
        tokens = (pages >= 0).nonzero(as_tuple=True)[0]
        pages, within = pages[tokens], slots[tokens] % size
        return _Rows(tokens, self._staging.base_rows(pages, within), pages, within)

    def _drop(self, places: list[int], reason: str) -> None:
        pages = []
        for place in places:
            pages.append(self._open.pop(place).page)
            self._page_of[place] = -1
        self._counts.add("blocks_not_stored", len(places), reason)
        self._staging.give_back(pages)

    def check(self) -> None:
        """Check that pages of open blocks are used once, and known by their places."""
        pages = [block.page for block in self._open.values()]
        assert len(set(pages)) == len(pages)
        open_places = (self._page_of >= 0).nonzero(as_tuple=True)[0].tolist()
        assert open_places == sorted(self._open)
        assert all(int(self._page_of[p]) == block.page for p, block in self._open.items())
