"""Answer operators over HTTP: list blocks, describe one, pin it, and show memory and disk.

    GET  /blocks?limit=N&after=HASH   at most N hashes, in order
    GET  /blocks/{hash}               a block's tier, age, leases and pin
    GET  /segments                    memory and the files on disk: used, free, unusable
    POST /pin                         {"hash": …, "kind": "soft" | "hard" | "none", "ttl_s": …}

Hashes are hexadecimal. Contents are never shown: they move by one-sided transfers.
"""

import heapq
import re
import time
from typing import Annotated, Literal

import msgspec

from halfmoon_kvstore.admin_reports import (
    BlockPage,
    BlockReport,
    HashText,
    MemoryReport,
    PinCounts,
    PinReport,
    SegmentsReport,
    TenantUse,
)
from halfmoon_kvstore.worker import KvstoreWorker
from halfmoon_protocol.ids import BlockHash
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.observability.operator_http import (
    OperatorHttp,
    OperatorHttpError,
    OperatorRequest,
    decode_body,
)
from halfmoon_runtime.observability.route_doc import RouteDoc
from halfmoon_scheduling.cache.pins import PinRefused
from halfmoon_scheduling.tiers.tiered_cache import TieredCache

_MAX_LISTED = 10_000


#: At most 128 digits, two for each byte.
_HASH = re.compile(r"([0-9a-fA-F]{2}){1,64}")
_NO_BLOCK = "There is no such block here."
_Limit = Annotated[
    int,
    msgspec.Meta(
        ge=1, le=_MAX_LISTED, description="Hashes of a page at the most; 100 if not given."
    ),
]
_After = Annotated[
    HashText, msgspec.Meta(description="Return hashes behind this one: the last of a page before.")
]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class PinBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pin that a block is to have."""

    #: The block to pin, in hexadecimal.
    hash: HashText
    #: "none" removes the pin.
    kind: Literal["soft", "hard", "none"]
    #: Seconds from now; without it and `until` the pin stays until it is removed.
    ttl_s: _Seconds | None = None
    #: End of the pin in seconds since 1970, in place of `ttl_s`.
    until: float | None = None


class AdminApi:
    """Answer operators about one node."""

    def __init__(self, worker: KvstoreWorker, clock: Clock) -> None:
        self._worker = worker
        self._clock = clock

    def register(self, http: OperatorHttp) -> None:
        """Add the routes to the HTTP server."""
        page = {"limit": _Limit, "after": _After}
        http.add("GET", "/blocks", self.blocks, RouteDoc(query=page, answer=BlockPage))
        block = RouteDoc(parts={"hash": HashText}, answer=BlockReport, errors={404: _NO_BLOCK})
        http.add("GET", "/blocks/{hash}", self.block, block)
        http.add("GET", "/segments", self.segments, RouteDoc(answer=SegmentsReport))
        pin = RouteDoc(
            body=PinBody,
            answer=BlockReport,
            errors={404: _NO_BLOCK, 409: "Hard pins keep as many blocks as they may."},
        )
        http.add("POST", "/pin", self.pin, pin)

    # -- blocks ------------------------------------------------------------------------------

    async def blocks(self, request: OperatorRequest) -> object:
        """Return hashes in order, so that a next page can begin `after` the last one."""
        limit = _whole(request, "limit", 100, _MAX_LISTED)
        after = _hash(request.query["after"], "after") if "after" in request.query else b""
        tiers = self._worker.tiers
        stored = [] if tiers is None else tiers.hashes()
        page = heapq.nsmallest(limit, (block for block in stored if block > after))
        return BlockPage(len(stored), [block.hex() for block in page])

    async def block(self, request: OperatorRequest) -> object:
        """Describe one block."""
        return self._look(_hash(request.parts["hash"], "hash"))

    def _look(self, block: BlockHash) -> BlockReport:
        store, now = self._worker.block_store, self._clock.now()
        tiers, layout = store.tiers, store.layout
        if tiers is None or layout is None or block not in tiers:
            raise _not_found(block, self._worker)
        parent, depth = tiers.parent_and_depth(block)
        in_memory = tiers.memory.inspect(block)
        return BlockReport(
            hash=block.hex(),
            parent=None if parent is None else parent.hex(),
            depth=depth,
            tier="memory" if in_memory else "disk",
            on_disk=block in tiers.disk,
            bytes=layout.block_bytes,
            age_s=None if in_memory is None else now - in_memory.stored_s,
            tenant=tiers.tenants.owner(block),
            leases=0 if in_memory is None else in_memory.n_leases,
            pin=_pin_of(tiers, block, now),
            held=block in tiers.pins.held,
            worker_id=self._worker.info.worker_id,
            generation=self._worker.info.generation,
        )

    async def pin(self, request: OperatorRequest) -> object:
        """Pin a block or remove its pin, and describe the block."""
        body = decode_body(request.body, PinBody)
        if body.ttl_s is not None and body.until is not None:
            raise OperatorHttpError(400, "give ttl_s or until, not both", param="until")
        block, tiers = _hash(body.hash, "hash"), self._worker.tiers
        if tiers is None or block not in tiers:
            raise _not_found(block, self._worker)
        ttl_s = float("inf") if body.ttl_s is None else body.ttl_s
        if body.until is not None and (ttl_s := body.until - time.time()) <= 0:
            raise OperatorHttpError(400, f"until is {-ttl_s:.0f} s ago", param="until")
        if body.kind == "none":
            tiers.unpin(block)
        else:
            try:
                tiers.pin(block, body.kind, self._clock.now() + ttl_s)
            except PinRefused as error:
                raise OperatorHttpError(409, str(error), param="kind", code="pin_limit") from None
        return self._look(block)

    # -- in all ------------------------------------------------------------------------------

    async def segments(self, request: OperatorRequest) -> object:
        """Describe memory and files.

        Slots are of equal size, so no free slot is too small. Only the bytes beside the slots
        can't be used (`lost_bytes`); `fragmentation` is their share.
        """
        store, info = self._worker.block_store, self._worker.info
        block_bytes = 0 if store.layout is None else store.layout.block_bytes
        length, n_slots = store.region.length, info.n_blocks
        lost_bytes = length - n_slots * block_bytes if n_slots else 0
        memory = MemoryReport(
            store.region.segment,
            length,
            n_slots,
            lost_bytes,
            lost_bytes / length if n_slots else 0.0,
        )
        pins = PinCounts()
        if (tiers := store.tiers) is not None:
            memory = msgspec.structs.replace(
                memory,
                used=tiers.memory.n_used,
                free=tiers.memory.n_slots - tiers.memory.n_used,
                stored=tiers.memory.n_stored,
                reserved=tiers.memory.n_reserved,
                leased=tiers.memory.n_leased,
            )
            pins = PinCounts(
                tiers.pins.n_soft, tiers.pins.n_hard, tiers.pins.n_held, tiers.pins.max_held
            )
        return SegmentsReport(
            worker_id=info.worker_id,
            generation=info.generation,
            draining=info.draining,
            block_bytes=block_bytes,
            n_blocks=0 if tiers is None else len(tiers.hashes()),
            memory=memory,
            disk=[] if store.disk is None else store.disk.describe(),
            disk_off=tiers is not None and tiers.disk_is_off,
            disk_missing_bytes=store.missing_disk_bytes,
            pins=pins,
            tenants={} if tiers is None else _tenants(tiers),
        )


def _pin_of(tiers: TieredCache, block: BlockHash, now: float) -> PinReport | None:
    if (pin := tiers.pins.get(block)) is None:
        return None
    remaining_s = pin.until_s - now
    return PinReport(pin.kind, None if remaining_s == float("inf") else remaining_s)


def _tenants(tiers: TieredCache) -> dict[str, TenantUse]:
    return {
        tenant: TenantUse(n_blocks, tiers.tenants.quota(tenant))
        for tenant, n_blocks in tiers.tenants.usage().items()
    }


def _not_found(block: BlockHash, worker: KvstoreWorker) -> OperatorHttpError:
    name = worker.info.worker_id
    return OperatorHttpError(404, f"block {block.hex()} is not at {name}", code="block_not_found")


def _hash(text: str, param: str) -> BlockHash:
    if not _HASH.fullmatch(text):
        raise OperatorHttpError(
            400, f"{param} is {text[:80]!r}, not hexadecimal of 1 to 64 bytes", param=param
        )
    return BlockHash(bytes.fromhex(text))


def _whole(request: OperatorRequest, name: str, default: int, most: int) -> int:
    text = request.query.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 0 < int(text) <= most:
        raise OperatorHttpError(400, f"{name} is {text[:80]!r}, not 1 to {most}", param=name)
    return int(text)
