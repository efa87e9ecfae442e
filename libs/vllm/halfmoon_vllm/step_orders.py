"""Define what the scheduler's side of the connector orders from the worker's side, step by step."""

from dataclasses import dataclass

from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.messages import KvstoreAddress


@dataclass(frozen=True)
class LoadOrder:
    """Blocks to read into vLLM's cache before a request is computed."""

    request_id: str
    #: In prefix order.
    hashes: tuple[BlockHash, ...]
    #: Where each goes: its first slot in vLLM's cache, divided by the pool's block size.
    places: tuple[int, ...]
    #: Kvstores that hold them as far as is known, best first.
    sources: tuple[KvstoreAddress, ...]


@dataclass(frozen=True)
class StoreOrder:
    """Blocks whose computation begins in this step, and that a kvstore shall keep."""

    request_id: str
    #: In prefix order.
    hashes: tuple[BlockHash, ...]
    #: Hash of the block before the first; None at the start of a prompt.
    parent: BlockHash | None
    #: Tokens of all these blocks.
    token_ids: tuple[int, ...]
    #: As in `LoadOrder`.
    places: tuple[int, ...]
    home: KvstoreAddress


@dataclass(frozen=True)
class StepOrders:
    """All orders of one step; the scheduler's side hands it to the worker's with the step."""

    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    #: Requests that ended or were preempted: their blocks may hold others' tokens from now on.
    dropped: tuple[str, ...] = ()
    #: Whether the step computes tokens. If not, it is made to ask for loads that are over.
    computes: bool = True
