"""Take the steps of prompts that a group computes, at stage 0 and at the further stages.

Stage 0 leases the cached prefix and reserves room for all stages. Each stage reads and writes the
part of every block that has its layers. A block's checksum covers all layers, so stage 0 reads the
other stages' parts as well: those of cached blocks behind its own, to verify them, and those of
new blocks from the kvstore's room, to commit them.
"""

import asyncio
from dataclasses import dataclass

import msgspec
import structlog

from halfmoon_prefix_cache.layer_groups import layer_groups
from halfmoon_prefix_cache.prefix_fetch import PrefixFetch
from halfmoon_protocol import error_codes
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    ActivationSlots,
    BlockPlaces,
    ChunkSent,
    Message,
    PrefillCost,
    ShareDone,
    ShareEnded,
    ShareKept,
    ShareReady,
    SlotFreed,
    Stage,
    StartShare,
)
from halfmoon_protocol.stage_layers import layer_counts, stage_weights
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.worker.conductor_connections import ConductorConnections
from halfmoon_scheduling.prediction.pipeline_latency import choose_chunk_tokens
from halfmoon_scheduling.prefill.chunk_flow import SLOTS_PER_SHARE
from halfmoon_scheduling.prefill.prefill_commands import PrefillEnding, ReportDone, SendChunk
from halfmoon_scheduling.prefill.prefill_events import PrefillFailure, PrefixLeased, StagesStarted
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import Piece, Transfer, TransferError
from halfmoon_transfer.regions.region_table import PoolMemory
from halfmoon_workers.prefill.activation_buffers import ActivationBuffers
from halfmoon_workers.prefill.prefill_job import PrefillJob
from halfmoon_workers.prefill.prefill_refusal import PrefillRefused
from halfmoon_workers.prefill.stage_engine import say_layers

log = structlog.get_logger()


@dataclass(frozen=True)
class GroupSteps:
    """Steps at one member of a group."""

    transfer: TransferEngine
    memory: PoolMemory
    layout: KvLayout
    conductors: ConductorConnections
    clock: Clock
    stage: Stage
    #: Of the whole model at this worker.
    cost: PrefillCost
    #: Bytes of one token's activations.
    token_bytes: int
    #: Seconds to wait for the next layer of cached blocks.
    patience_s: float

    # -- stage 0 -----------------------------------------------------------------------------

    async def start_stages(self, job: PrefillJob) -> StagesStarted:
        """Start the shares of the further stages.

        Raises:
            PrefillRefused: a stage refused, failed, or is lost.
        """
        assert job.group is not None, "a prompt of one worker has no further stages"
        job.outgoing = await self._open_buffers()
        slots, most = await job.group.start(
            lambda stage, after: self._order(job, stage, after), self.token_bytes
        )
        job.next_slots = slots
        n_slots = min(SLOTS_PER_SHARE, len(slots.offsets))
        chunk_tokens = choose_chunk_tokens(
            self.cost,
            len(job.start.token_ids),
            job.n_cached,
            weights=stage_weights(layer_counts(self.layout.n_layers, self.stage.n_stages)),
            most=min(most, self.stage.chunk_tokens),
            step=self.layout.block_size,
        )
        return StagesStarted(job.request_id, n_slots, chunk_tokens)

    def _order(self, job: PrefillJob, index: int, after: ActivationSlots | None) -> StartShare:
        start, cached, room = job.start, None, None
        since_s = self.clock.now() - job.arrived_s
        if job.lease is not None:
            offsets = tuple(place.offset for place in job.lease.places)
            cached = BlockPlaces(job.lease.region, tuple(range(len(offsets))), offsets)
        if job.put is not None and job.put.offsets:
            places = job.put.offsets
            room = BlockPlaces(job.put.region, tuple(places), tuple(places.values()))
        return StartShare(
            request_id=job.request_id,
            stage=self._stage(index),
            layout=self.layout,
            token_ids=start.token_ids,
            n_prompt=start.n_prompt,
            landing=start.landing,
            landing_expires_s=max(0.0, job.write_until_s - self.clock.now()),
            sampling=start.sampling,
            cached=cached,
            room=room,
            next_slots=after,
            priority=start.priority,
            deadline_s=None if start.deadline_s is None else max(0.0, start.deadline_s - since_s),
            trace=start.trace,
            n_held_blocks=start.n_held_blocks,
            masked_token_ids=job.masked_token_ids if after is None else (),
        )

    def _stage(self, index: int) -> Stage:
        """Return another stage of this group, as its record must state it."""
        other = msgspec.structs.replace(self.stage, index=index)
        return say_layers(other, self.layout.n_layers)

    async def read_back(self, job: PrefillJob) -> bool:
        """Read the other stages' layers of the new blocks into this pool, for their checksums.

        Returns:
            Whether they are all here; if not, the blocks can't be kept.
        """
        assert job.group is not None, "a prompt of one worker has all layers here"
        if not await job.group.wait_kept():
            return False
        if job.room is None:
            return True
        region, offsets = job.room
        layers = range(len(job.share.layers(self.layout.n_layers)), self.layout.n_layers)
        shift, size = layers.start * self.layout.layer_bytes, len(layers) * self.layout.layer_bytes
        pieces = [
            Piece(
                self.memory.region,
                job.pages[block] * self.layout.block_bytes + shift,
                region,
                offset + shift,
                size,
            )
            for block, offset in offsets.items()
        ]
        if not pieces:
            return True
        read = self.transfer.submit("read", pieces)
        job.put_writes.append(read)
        try:
            await read
        except TransferError as error:
            log.info("blocks_not_stored", request_id=job.request_id, reason=str(error))
            return False
        return True

    # -- every stage -------------------------------------------------------------------------

    async def _open_buffers(self) -> ActivationBuffers:
        return await asyncio.to_thread(
            ActivationBuffers, self.transfer, self.stage.chunk_tokens, self.token_bytes
        )

    def begin_send(self, job: PrefillJob, command: SendChunk) -> Transfer:
        """Start to write a chunk's activations to the next stage."""
        assert job.outgoing is not None and job.next_slots is not None, "there is no next stage"
        n_tokens = command.stop - command.start
        left_s = max(job.write_until_s - self.clock.now(), 0.001)
        pieces = job.outgoing.send_pieces(command.slot, n_tokens, job.next_slots)
        write = self.transfer.submit("write", pieces, deadline_s=left_s, verify=True)
        job.activation_writes.append(write)
        return write

    async def announce_chunk(
        self,
        job: PrefillJob,
        command: SendChunk,
        write: Transfer,
        before: "asyncio.Task[None] | None",
    ) -> None:
        """Say that a chunk is at the next stage, once it is, and once those before it are.

        Raises:
            PrefillRefused: the activations did not arrive.
        """
        try:
            await write
        except TransferError as error:
            assert job.next_slots is not None, "there is no next stage"
            to = job.next_slots.region.segment
            reason = f"activations did not reach {to}: {error}"
            failure = PrefillFailure(reason, retryable=True, code=error_codes.PEER_FAILED)
            raise PrefillRefused(failure) from None
        if before is not None:
            await asyncio.wait([before])
        sent = ChunkSent(
            request_id=job.request_id,
            stage=job.share.stage + 1,
            start=command.start,
            stop=command.stop,
            slot=command.slot,
        )
        if job.group is not None:
            job.group.send_to_next(sent)
        else:
            await self.conductors.answer(job.owner, sent)

    async def close(self, job: PrefillJob) -> None:
        """Release the slots of a prompt: no forward pass and no transfer here uses them."""
        for buffers in (job.incoming, job.outgoing):
            if buffers is not None:
                await asyncio.to_thread(buffers.close)

    # -- further stages ----------------------------------------------------------------------

    async def open_share(self, job: PrefillJob, n_blocks: int) -> PrefixLeased:
        """Open the slots, start to read the cached prefix, and tell stage 0 of the slots."""
        job.incoming = await self._open_buffers()
        if not job.share.is_last:
            assert job.order is not None, "a further stage has an order"
            job.outgoing, job.next_slots = await self._open_buffers(), job.order.next_slots
        if n_blocks:
            self._fetch(job, n_blocks)
        ready = ShareReady(request_id=job.request_id, slots=job.incoming.slots)
        await self.conductors.answer(job.owner, ready)
        return PrefixLeased(job.request_id, n_blocks=n_blocks)

    def _fetch(self, job: PrefillJob, n_blocks: int) -> None:
        job.n_cached = n_blocks * self.layout.block_size
        job.fetching_since_s = job.leased_s = self.clock.now()
        layers = job.share.layers(self.layout.n_layers)

        def submit(group: range) -> Transfer:
            return self.transfer.submit(
                "read",
                job.load_pieces(self.memory.region, self.layout, layers[group.start : group.stop]),
                deadline_s=max(job.write_until_s - self.clock.now(), 0.001),
            )

        async def no_other(error: TransferError, n_here: int) -> bool:
            del error, n_here
            return False  # stage 0 has leased one replica for all

        groups = layer_groups(len(layers), n_blocks * self.layout.layer_bytes)
        job.loads = PrefixFetch(groups, submit, no_other, self.patience_s).layers

    async def report_share(self, job: PrefillJob, done: ReportDone) -> None:
        """Tell stage 0 that the KV of this stage has landed."""
        message = ShareDone(
            request_id=job.request_id,
            first_token=done.first_token,
            score=job.first_scores[-1] if job.first_scores else None,
            prompt_scores=tuple(job.prompt_scores),
            compute_s=done.compute_s,
        )
        await self.conductors.answer(job.owner, message)

    async def keep_share(self, job: PrefillJob) -> None:
        """Wait until the kvstore has acknowledged this stage's layers of the new blocks."""
        try:
            for write in job.put_writes:
                await write
        except TransferError as error:
            log.info("blocks_not_stored", request_id=job.request_id, reason=str(error))
        else:
            job.is_room_written = True

    def free_slot(self, job: PrefillJob, slot: int) -> Message:
        """Return what the stage before is told of a slot whose chunk is computed."""
        return SlotFreed(request_id=job.request_id, stage=job.share.stage, slot=slot)


def share_ending(job: PrefillJob, ending: PrefillEnding) -> ShareKept | ShareEnded:
    """Return what stage 0 is told of the end of a share."""
    if ending is None:
        return ShareKept(request_id=job.request_id, is_written=job.is_room_written)
    if not isinstance(ending, PrefillFailure):
        return ShareEnded(request_id=job.request_id, landing_in_doubt=job.landing_in_doubt)
    return ShareEnded(
        request_id=job.request_id,
        reason=ending.reason,
        retryable=ending.retryable,
        culprit=ending.culprit,
        invalid=ending.invalid,
        landing_in_doubt=job.landing_in_doubt,
        code=ending.code,
    )
