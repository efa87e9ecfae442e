"""Carry out orders to copy another kvstore's blocks to this one.

An order leases the blocks at the source, reserves places here, reads and verifies the bytes, and
serves the blocks. One order runs at a time; others are refused and may be retried.
"""

from halfmoon_kvstore.block_store import BlockStore
from halfmoon_kvstore.kv_event_builder import kept_for_events, stored_events
from halfmoon_kvstore.outbox import Outbox
from halfmoon_kvstore.refusal_codes import code_of
from halfmoon_kvstore.replication.replica_reader import ReplicaReader
from halfmoon_protocol import error_codes
from halfmoon_protocol.errors import LayoutMismatch
from halfmoon_protocol.messages import (
    BlocksLeased,
    BlocksReplicated,
    KvstoreRefused,
    ReplicateBlocks,
    ReserveBlocks,
)
from halfmoon_runtime.channels.network import PeerId
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.kvstore_clients import KvstoreUnavailable
from halfmoon_runtime.worker.message_loop import record_failure
from halfmoon_scheduling.cache.block_cache import CacheError, CacheFull
from halfmoon_transfer.interface import TransferError

#: Owner of reservations for copies from other kvstores; no client has this name.
_COPIES = "copies"
_FOREVER_S = float("inf")
#: Seconds after which a conductor may retry while another copy is running.
_RETRY_S = 1.0


class ReplicationHandler:
    """Carry out copy orders, one at a time."""

    def __init__(
        self,
        reader: ReplicaReader,
        block_store: BlockStore,
        outbox: Outbox,
        clock: Clock,
        *,
        event_tokens: bool = False,
    ) -> None:
        """Prepare the handler; `event_tokens` announces copied blocks with their tokens."""
        self._event_tokens = event_tokens
        self._reader = reader
        self._block_store = block_store
        self._outbox = outbox
        self._clock = clock

    def refusal(self, order: ReplicateBlocks) -> KvstoreRefused | None:
        """Return the refusal of an order that can't start now; None if it can."""
        if not self._reader.busy:
            return None
        reason = f"{self._block_store.name} copies other blocks just now"
        return KvstoreRefused(
            ticket=order.ticket,
            reason=reason,
            retry_after_s=_RETRY_S,
            code=error_codes.NO_ROOM,
        )

    async def replicate(self, peer: PeerId, order: ReplicateBlocks) -> None:
        """Copy the blocks of an order, and answer with their number or the reason of a failure."""
        self._outbox.answer(peer, await self._outcome(peer, order))
        await self._outbox.send()

    async def _outcome(
        self, peer: PeerId, order: ReplicateBlocks
    ) -> BlocksReplicated | KvstoreRefused:
        try:
            async with self._reader.leased(order) as lease:
                n_blocks = await self._copy(order, lease)
        except CacheFull as error:
            return KvstoreRefused(
                ticket=order.ticket,
                reason=str(error),
                retry_after_s=error.retry_after_s,
                code=error.code,
            )
        except (KvstoreUnavailable, TransferError, LayoutMismatch, CacheError, ValueError) as error:
            return KvstoreRefused(ticket=order.ticket, reason=str(error), code=code_of(error))
        except Exception as error:  # a bug of ours: it costs this order, not the node
            record_failure(order, peer.hex())
            reason = f"the copy failed: {error!r}"
            return KvstoreRefused(
                ticket=order.ticket, reason=reason, code=error_codes.INTERNAL_ERROR
            )
        return BlocksReplicated(ticket=order.ticket, n_blocks=n_blocks)

    async def _copy(self, order: ReplicateBlocks, lease: BlocksLeased) -> int:
        """Copy the leased blocks; return how many of the order, from its first, are stored here."""
        size, n = order.layout.block_bytes, len(lease.places)
        put = ReserveBlocks(
            ticket=order.ticket,
            layout=order.layout,
            hashes=order.hashes[:n],
            parent=order.parent,
            token_ids=order.token_ids[: n * order.layout.block_size],
        )
        tiers = await self._block_store.tiers_for(put, tokens_unknown=not order.token_ids)
        # The reservation lasts as long as the read: until then bytes arrive.
        reserved = tiers.reserve(
            _COPIES, put.ticket, put.hashes, put.parent, self._clock.now(),
            ttl_s=_FOREVER_S, tenant=order.tenant, within_quota=False,
        )  # fmt: skip
        self._block_store.run_commands()
        try:
            places = {place.hash: place for place in lease.places}
            wanted = [(places[block], slot * size) for block, slot in reserved.places]
            checksums = await self._reader.read(lease, wanted, size) if wanted else []
        except BaseException:
            tiers.revoke(_COPIES, put.ticket)
            raise
        stored = tiers.commit(_COPIES, put.ticket, checksums, self._clock.now())
        announced = kept_for_events(put, with_tokens=self._event_tokens)
        self._outbox.publish(stored_events(announced, stored))
        self._block_store.run_commands()
        missing = (i for i, block in enumerate(put.hashes) if block not in tiers)
        return next(missing, len(put.hashes))
