"""Answer operators over HTTP: list blocks, describe one, pin it, and show memory and disk.

    GET  /blocks?limit=N&after=HASH   at most N hashes, in order
    GET  /blocks/{hash}               a block's tier, age, leases and pin
    GET  /segments                    memory and the files on disk: used, free, unusable
    POST /pin                         {"hash": …, "kind": "soft" | "hard" | "none", "ttl_s": …}

Hashes are hexadecimal. Contents are never shown: they move by one-sided transfers.
"""

import heapq
import time
from typing import Annotated, Literal

import msgspec

from halfmoon_kvstore.worker import KvstoreWorker
from halfmoon_protocol.ids import BlockHash
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.observability.operator_http import (
    OperatorHttp,
    OperatorHttpError,
    OperatorRequest,
)
from halfmoon_scheduling.cache.pins import PinRefused
from halfmoon_scheduling.tiers.tiered_cache import TieredCache

_MAX_LISTED = 10_000


class _PinBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hash: str
    kind: Literal["soft", "hard", "none"]
    #: Seconds from now; without it and `until` the pin stays until it is removed.
    ttl_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    #: End of the pin in seconds since 1970, in place of `ttl_s`.
    until: float | None = None


class AdminApi:
    """Answer operators about one node."""

    def __init__(self, worker: KvstoreWorker, clock: Clock) -> None:
        self._worker = worker
        self._clock = clock

    def register(self, http: OperatorHttp) -> None:
        """Add the routes to the HTTP server."""
        http.add("GET", "/blocks", self.blocks)
        http.add("GET", "/blocks/{hash}", self.block)
        http.add("GET", "/segments", self.segments)
        http.add("POST", "/pin", self.pin)

    # -- blocks ------------------------------------------------------------------------------

    async def blocks(self, request: OperatorRequest) -> object:
        """Return hashes in order, so that a next page can begin `after` the last one."""
        limit = _whole(request, "limit", 100, _MAX_LISTED)
        after = _hash(request.query["after"], "after") if "after" in request.query else b""
        tiers = self._worker.tiers
        stored = [] if tiers is None else tiers.hashes()
        page = heapq.nsmallest(limit, (block for block in stored if block > after))
        return {"n_blocks": len(stored), "hashes": [block.hex() for block in page]}

    async def block(self, request: OperatorRequest) -> object:
        """Describe one block."""
        return self._look(_hash(request.parts["hash"], "hash"))

    def _look(self, block: BlockHash) -> dict[str, object]:
        store, now = self._worker.block_store, self._clock.now()
        tiers, layout = store.tiers, store.layout
        if tiers is None or layout is None or block not in tiers:
            raise _not_found(block, self._worker)
        parent, depth = tiers.parent_and_depth(block)
        in_memory = tiers.memory.inspect(block)
        return {
            "hash": block.hex(),
            "parent": None if parent is None else parent.hex(),
            "depth": depth,
            "tier": "memory" if in_memory else "disk",
            "on_disk": block in tiers.disk,
            "bytes": layout.block_bytes,
            #: Seconds since it came to memory; a block on disk only has no age.
            "age_s": None if in_memory is None else now - in_memory.stored_s,
            "tenant": tiers.tenants.owner(block),
            "leases": 0 if in_memory is None else in_memory.n_leases,
            "pin": _pin_of(tiers, block, now),
            "held": block in tiers.pins.held,
            "worker_id": self._worker.info.worker_id,
            "generation": self._worker.info.generation,
        }

    async def pin(self, request: OperatorRequest) -> object:
        """Pin a block or remove its pin, and describe the block."""
        try:
            body = msgspec.json.decode(request.body, type=_PinBody)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OperatorHttpError(400, f"the body is no pin: {error}") from None
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
        memory: dict[str, object] = {
            "segment": store.region.segment,
            "bytes": length,
            "n_slots": n_slots,
            "lost_bytes": length - n_slots * block_bytes if n_slots else 0,
            "fragmentation": (length - n_slots * block_bytes) / length if n_slots else 0.0,
        }
        pins = {"soft": 0, "hard": 0, "held": 0, "max_held": 0}
        if (tiers := store.tiers) is not None:
            memory |= {
                "used": tiers.memory.n_used,
                "free": tiers.memory.n_slots - tiers.memory.n_used,
                "stored": tiers.memory.n_stored,
                "reserved": tiers.memory.n_reserved,
                "leased": tiers.memory.n_leased,
            }
            pins = {
                "soft": tiers.pins.n_soft,
                "hard": tiers.pins.n_hard,
                "held": tiers.pins.n_held,
                "max_held": tiers.pins.max_held,
            }
        return {
            "worker_id": info.worker_id,
            "generation": info.generation,
            "draining": info.draining,
            "block_bytes": block_bytes,
            "n_blocks": 0 if tiers is None else len(tiers.hashes()),
            "memory": memory,
            "disk": [] if store.disk is None else store.disk.describe(),
            "disk_off": tiers is not None and tiers.disk_is_off,
            "pins": pins,
            "tenants": {} if tiers is None else _tenants(tiers),
        }


def _pin_of(tiers: TieredCache, block: BlockHash, now: float) -> dict[str, object] | None:
    if (pin := tiers.pins.get(block)) is None:
        return None
    remaining_s = pin.until_s - now
    return {"kind": pin.kind, "remaining_s": None if remaining_s == float("inf") else remaining_s}


def _tenants(tiers: TieredCache) -> dict[str, object]:
    return {
        tenant: {"n_blocks": n_blocks, "quota_blocks": tiers.tenants.quota(tenant)}
        for tenant, n_blocks in tiers.tenants.usage().items()
    }


def _not_found(block: BlockHash, worker: KvstoreWorker) -> OperatorHttpError:
    name = worker.info.worker_id
    return OperatorHttpError(404, f"block {block.hex()} is not at {name}", code="block_not_found")


def _hash(text: str, param: str) -> BlockHash:
    try:
        return BlockHash(bytes.fromhex(text))
    except ValueError:
        raise OperatorHttpError(
            400, f"{param} is {text[:80]!r}, not hexadecimal", param=param
        ) from None


def _whole(request: OperatorRequest, name: str, default: int, most: int) -> int:
    text = request.query.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= most:
        raise OperatorHttpError(400, f"{name} is {text[:80]!r}, not 1 to {most}", param=name)
    return int(text)
