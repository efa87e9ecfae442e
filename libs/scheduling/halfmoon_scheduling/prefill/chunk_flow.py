"""Track the chunks of one prompt at one stage: what arrived, what may run, where it goes next.

    the stage before ─▶ slots of this stage ─▶ a pass ─▶ slots of the next stage ─▶ …
                        arrived                 position  free_next

Slots give back-pressure: a chunk runs only when its activations are here and a slot of the next
stage is free for them.
"""

from collections import deque
from dataclasses import dataclass, field

import msgspec

from halfmoon_scheduling.prefill.prompt_share import WHOLE_PROMPT, PromptShare

#: Slots of one share at each stage: one is computed while the next one is written.
SLOTS_PER_SHARE = 2


class BadChunk(Exception):
    """A chunk or a slot that the other stages can't mean; the text names the values."""


class ArrivedChunk(msgspec.Struct, frozen=True):
    """Activations of tokens `start` to `stop`, in a slot of this stage."""

    start: int
    stop: int
    slot: int


@dataclass(eq=False, slots=True)
class ChunkFlow:
    """The chunks of one request at one stage."""

    share: PromptShare = WHOLE_PROMPT
    n_tokens: int = 0
    #: Tokens of a chunk at the most.
    chunk_tokens: int = 1
    #: Tokens whose KV is here: cached, or computed by passes that ended.
    position: int = 0
    #: Chunks to compute, in their order; the first begins at `position` unless it is in a pass.
    arrived: deque[ArrivedChunk] = field(default_factory=deque)
    #: The chunk in the pass under way, and the slot of the next stage that it is for.
    computing: ArrivedChunk | None = None
    sending: int | None = None
    #: Slots of the next stage in all, and those that may be written.
    n_next: int = 0
    free_next: deque[int] = field(default_factory=deque)

    def begin(self, position: int) -> None:
        """Begin behind so many cached tokens."""
        self.position = position

    def open_next(self, n_slots: int, chunk_tokens: int) -> None:
        """Use the slots of the next stage from now on."""
        self.n_next, self.chunk_tokens = n_slots, chunk_tokens
        self.free_next = deque(range(n_slots))

    @property
    def allowed(self) -> int:
        """Return the token up to which the next pass may compute; `position`: none may begin."""
        if not self.share.is_last and not self.free_next:
            return self.position
        if self.share.is_first:
            return min(self.position + self.chunk_tokens, self.n_tokens)
        return self.arrived[0].stop if self.arrived else self.position

    def take(self) -> tuple[int | None, int | None]:
        """Begin the pass of the next chunk; return its slot here, and at the next stage."""
        assert self.computing is None and self.sending is None, "two chunks in one pass"
        if not self.share.is_first:
            self.computing = self.arrived.popleft()
        if not self.share.is_last:
            self.sending = self.free_next.popleft()
        return None if self.computing is None else self.computing.slot, self.sending

    def end(self, stop: int) -> tuple[int | None, int | None]:
        """End that pass at this token; return the slot to free, and the slot to send to."""
        slots = None if self.computing is None else self.computing.slot, self.sending
        self.position, self.computing, self.sending = stop, None, None
        return slots

    def on_arrived(self, chunk: ArrivedChunk) -> None:
        """Take a chunk that the stage before has written.

        Raises:
            BadChunk: it is not the next chunk, or its slot is in use or does not exist.
        """
        last = self.arrived[-1] if self.arrived else self.computing
        expected = self.position if last is None else last.stop
        used = {each.slot for each in self.arrived}
        if self.computing is not None:
            used.add(self.computing.slot)
        if self.share.is_first:
            raise BadChunk("stage 0 has no stage before it that could send a chunk")
        if chunk.start != expected or not chunk.start < chunk.stop <= self.n_tokens:
            raise BadChunk(
                f"stage {self.share.stage} got tokens {chunk.start} to {chunk.stop} of "
                f"{self.n_tokens}; the next chunk begins at {expected}"
            )
        if chunk.slot in used or chunk.slot >= SLOTS_PER_SHARE:
            raise BadChunk(
                f"stage {self.share.stage} got a chunk in slot {chunk.slot}; it has "
                f"{SLOTS_PER_SHARE} slots, of which {sorted(used)} are in use"
            )
        if chunk.stop - chunk.start > self.chunk_tokens:
            raise BadChunk(
                f"stage {self.share.stage} got a chunk of {chunk.stop - chunk.start} tokens; its "
                f"slots hold {self.chunk_tokens}"
            )
        self.arrived.append(chunk)

    def on_next_freed(self, slot: int) -> None:
        """Take note that a slot of the next stage may be written again.

        Raises:
            BadChunk: it was free, or does not exist.
        """
        if slot >= self.n_next or slot in self.free_next or slot == self.sending:
            raise BadChunk(
                f"stage {self.share.stage + 1} freed slot {slot}, which held no chunk; it has "
                f"{self.n_next} slots"
            )
        self.free_next.append(slot)

    def check(self) -> None:
        """Audit: chunks follow each other, and no slot has two."""
        expected = self.position if self.computing is None else self.computing.stop
        for chunk in self.arrived:
            assert chunk.start == expected, "a chunk is missing"
            expected = chunk.stop
        slots = [chunk.slot for chunk in (self.computing, *self.arrived) if chunk is not None]
        assert len(set(slots)) == len(slots) <= SLOTS_PER_SHARE
        free = [*self.free_next, *([] if self.sending is None else [self.sending])]
        assert len(set(free)) == len(free) <= self.n_next
