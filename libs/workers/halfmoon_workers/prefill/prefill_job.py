"""Hold one prompt that a worker prefills: its pages, what comes in and what goes out.

    pages of the request in this worker's pool, one block each:

        [ cached blocks │ computed, full │ last one, perhaps partly filled ]
          read from a     ──────────── written to the decode's landing ─────────────
          kvstore         ── full ones also to the home kvstore ──

Bytes move layer by layer. A block's layer is handed to the transfer engine as soon as it is
complete in the pool: for a full block once its last token has run, for the last block once
the prompt is over. It is never written again, so it may be read while later tokens run.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from halfmoon_prefix_cache.block_put import KvstoreReservation
from halfmoon_prefix_cache.kvstore_lease import KvstoreLease
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.messages import ActivationSlots, KvstoreAddress, StartPrefill, StartShare
from halfmoon_protocol.regions import Region
from halfmoon_runtime.channels.network import PeerId
from halfmoon_scheduling.prefill.prefill_events import PrefillEvent
from halfmoon_scheduling.prefill.prompt_share import WHOLE_PROMPT, PromptShare
from halfmoon_transfer.interface import Piece, Transfer
from halfmoon_workers.prefill.activation_buffers import ActivationBuffers
from halfmoon_workers.prefill.group_prompt import GroupPrompt


@dataclass(frozen=True)
class ForwardPassRecord:
    """One forward pass over one chunk of it, with those of others."""

    began_s: float
    ended_s: float
    #: Of these seconds, those in which it waited for cached layers.
    layers_wait_s: float
    start: int
    stop: int
    n_requests: int


@dataclass
class PrefillJob:
    """The state of one request; changed by the worker's event loop, read by the forward."""

    start: StartPrefill
    owner: PeerId
    #: When the command came, and until when the landing may be written.
    arrived_s: float
    write_until_s: float
    #: The layers that are computed here; of a further stage, what stage 0 has ordered.
    share: PromptShare = WHOLE_PROMPT
    order: StartShare | None = None
    #: At stage 0 of a group: the shares of the other stages.
    group: GroupPrompt | None = None
    pages: list[int] = field(default_factory=list)
    #: Whether its pages are those of its landing: a decode worker prefills for itself.
    in_place: bool = False
    #: Activations that arrive, those that are sent, and where to; None: none are.
    incoming: ActivationBuffers | None = None
    outgoing: ActivationBuffers | None = None
    next_slots: ActivationSlots | None = None
    activation_writes: list[Transfer] = field(default_factory=list)
    #: Announces the chunk that was sent last, after those before it.
    announcing: "asyncio.Task[None] | None" = None
    #: Of a share: whether the room at the kvstore has its layers of the new blocks.
    is_room_written: bool = False
    #: Whether a further stage may still write to the landing though it was told to stop.
    landing_in_doubt: bool = False
    #: Takes its steps, one after another; the step to take next; whether it is between two.
    steps: "asyncio.Task[None] | None" = None
    next_step: "Callable[[PrefillJob], Awaitable[PrefillEvent]] | None" = None
    between_steps: bool = False
    #: Renews its lease and its reservation.
    renewal: "asyncio.Task[None] | None" = None
    lease: KvstoreLease | None = None
    put: KvstoreReservation | None = None
    #: Set when one of these two came, until both are let go: what renews them waits for it.
    holds: asyncio.Event = field(default_factory=asyncio.Event)
    #: Tokens whose KV is fetched or held rather than computed: whole blocks.
    n_cached: int = 0
    #: Bytes of KV that went to the landing, and of blocks that it had already.
    n_sent_bytes: int = 0
    n_held_bytes: int = 0
    #: Blocks whose layers have all been handed to the transfer engine.
    n_streamed: int = 0
    #: The layers of cached blocks, as they arrive; empty when nothing is cached. At a further
    #: stage, those of its layers.
    loads: Sequence[Transfer] = ()
    #: Checksums of the cached blocks, computed as they arrive; None when nothing is cached.
    checksums: Awaitable[tuple[int, ...]] | None = None
    #: Kvstores whose reads failed; none is tried twice.
    failed_sources: set[KvstoreAddress] = field(default_factory=set)
    #: Whose blocks were verified, and how many of them came from its disk.
    fetched_from: WorkerId | None = None
    n_from_disk: int = 0
    landing_writes: list[Transfer] = field(default_factory=list)
    put_writes: list[Transfer] = field(default_factory=list)
    #: The first token's score, and those of the prompt computed so far; if they are wanted.
    first_scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    #: Why its KV can't be trusted, found in the middle of a forward pass.
    failure: Exception | None = None
    #: When its first forward began; 0: not yet.
    computing_since_s: float = 0.0
    #: Seconds from its lease to the last layer of its cached blocks.
    fetch_s: float = 0.0
    #: When it asked for cached blocks and when a kvstore held them; when the first of its KV went
    #: to the landing, when all of it was there, and when that was said. 0: not yet.
    fetching_since_s: float = 0.0
    leased_s: float = 0.0
    landing_since_s: float = 0.0
    settled_s: float = 0.0
    done_s: float = 0.0
    #: Its forward passes, kept only when it is traced.
    passes: list[ForwardPassRecord] = field(default_factory=list)

    @property
    def request_id(self) -> RequestId:
        """The id of this try."""
        return self.start.request_id

    @property
    def n_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return len(self.start.token_ids)

    @property
    def masked_token_ids(self) -> tuple[int, ...]:
        """Tokens that the first new one must not be."""
        if self.order is not None:
            return self.order.masked_token_ids
        return self.start.stopping.masked_after(0)

    def load_pieces(self, pool: Region, layout: KvLayout, layers: range) -> list[Piece]:
        """List the reads of these layers of the cached blocks, from the kvstore into this pool."""
        if self.order is not None:
            assert self.order.cached is not None, "nothing is cached of this share"
            source, offsets = self.order.cached.region, self.order.cached.offsets
        else:
            assert self.lease is not None
            source = self.lease.region
            offsets = tuple(place.offset for place in self.lease.places)
        block_bytes = layout.block_bytes
        shift, size = _part_of_block(layout, layers)
        pages = self.pages[self.n_held_in_place :]
        return [
            Piece(pool, page * block_bytes + shift, source, offset + shift, size)
            for page, offset in zip(pages, offsets, strict=False)
        ]

    @property
    def n_held_in_place(self) -> int:
        """Blocks at the beginning of its pages that are there, and are read by others."""
        return self.start.n_held_blocks if self.in_place else 0

    def complete_blocks(self, stop: int, layout: KvLayout) -> range:
        """Return the blocks to hand on once the tokens before `stop` have run."""
        last = layout.blocks_for(stop) if stop == self.n_tokens else stop // layout.block_size
        return range(self.n_streamed, max(self.n_streamed, last))

    def landing_pieces(
        self, pool: Region, layout: KvLayout, layers: range, blocks: Sequence[int]
    ) -> list[Piece]:
        """List the writes of these blocks from this pool to decode's landing; none in place.

        Blocks that the landing has already are left out.

        Args:
            pool: has the blocks.
            layout: of a block.
            layers: the layers to write, which are contiguous in a block.
            blocks: by their number in the prompt.
        """
        if self.in_place:
            return []
        target, targets = self.start.landing.region, self.start.landing.pages
        pages, block_bytes = self.pages, layout.block_bytes
        shift, length = _part_of_block(layout, layers)
        return [
            Piece(
                pool,
                pages[block] * block_bytes + shift,
                target,
                targets[block] * block_bytes + shift,
                length,
            )
            for block in blocks
            if block >= self.start.n_held_blocks
        ]

    def kvstore_pieces(
        self, pool: Region, layout: KvLayout, layers: range, blocks: Sequence[int]
    ) -> list[Piece]:
        """List the writes of those of these blocks that the home kvstore wants.

        The arguments are those of `landing_pieces`.
        """
        if self.room is None:
            return []
        target, offsets = self.room
        pages, block_bytes = self.pages, layout.block_bytes
        shift, length = _part_of_block(layout, layers)
        return [
            Piece(pool, pages[block] * block_bytes + shift, target, offsets[block] + shift, length)
            for block in blocks
            if block in offsets
        ]

    @property
    def room(self) -> tuple[Region, Mapping[int, int]] | None:
        """Return where new blocks are kept: a region, and offsets by block; None: nowhere."""
        if self.put is not None:
            return self.put.region, self.put.offsets
        return self._ordered_room

    @cached_property
    def _ordered_room(self) -> tuple[Region, Mapping[int, int]] | None:
        """The room that stage 0 has reserved for a share."""
        room = None if self.order is None else self.order.room
        if room is None:
            return None
        return room.region, dict(zip(room.blocks, room.offsets, strict=True))

    @property
    def transfers(self) -> list[Transfer]:
        """All transfers, under way or over."""
        return [
            *self.loads,
            *self.activation_writes,
            *self.landing_writes,
            *self.put_writes,
        ]


def _part_of_block(layout: KvLayout, layers: range) -> tuple[int, int]:
    """Return offset and length, in bytes, of these layers within a block."""
    return layers.start * layout.layer_bytes, len(layers) * layout.layer_bytes
