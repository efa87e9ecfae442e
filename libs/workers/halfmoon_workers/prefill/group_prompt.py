"""Follow one prompt at the further stages of a group, for stage 0.

start ─▶ last stage ─▶ … ─▶ stage 1      each is told where the stage after it has its slots
chunks and freed slots of further stages pass through here
ShareDone of all ─▶ the KV has landed    ShareKept of all ─▶ nothing more is written
stop ─▶ ShareEnded of all, or a stage is lost: then its landing is in doubt
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import assert_never

from halfmoon_protocol import error_codes
from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import (
    ActivationSlots,
    ChunkSent,
    ShareDone,
    ShareEnded,
    ShareKept,
    ShareProgress,
    ShareReady,
    SlotFreed,
    StageAddress,
    StartShare,
    StopShare,
    ToFirstStage,
)
from halfmoon_runtime.channels.network import PeerUnreachable
from halfmoon_scheduling.prefill.prefill_events import (
    NextSlotFreed,
    PrefillEvent,
    PrefillFailure,
    StepFailed,
)
from halfmoon_workers.prefill.prefill_refusal import PrefillRefused
from halfmoon_workers.prefill.stage_links import StageLink, StageLinks

#: Makes the order for a stage: its index, and the slots of the stage after it.
MakeOrder = Callable[[int, ActivationSlots | None], StartShare]


@dataclass
class _Share:
    """The share of one further stage."""

    address: StageAddress
    #: Set once the stage was told to start.
    link: StageLink | None = None
    slots: ActivationSlots | None = None
    done: ShareDone | None = None
    #: Its last word, or the loss of its link.
    end: ShareKept | ShareEnded | PeerUnreachable | None = None

    @property
    def may_write(self) -> bool:
        """Return whether the stage may still write to the landing, as far as is known."""
        if self.link is None or self.done is not None:
            return False
        if isinstance(self.end, ShareEnded):
            return self.end.landing_in_doubt
        return self.end is None or isinstance(self.end, PeerUnreachable)


class GroupPrompt:
    """The shares of one prompt at the stages after stage 0."""

    def __init__(
        self,
        request_id: RequestId,
        stages: Sequence[StageAddress],
        links: StageLinks,
        post: Callable[[PrefillEvent], None],
    ) -> None:
        """Prepare the shares; none is started.

        Args:
            request_id: of the prompt.
            stages: the workers of stages 1, 2, and so on.
            links: reach them.
            post: hands the machine of stage 0 an event.
        """
        self._request_id = request_id
        self._shares = [_Share(address) for address in stages]
        self._links = links
        self._post = post
        self._failure: PrefillFailure | None = None
        self._is_stopping = False
        #: Set when a share has changed.
        self._changed = asyncio.Event()

    @property
    def dones(self) -> list[ShareDone]:
        """Return what the stages said at their ends, in the order of the stages."""
        return [share.done for share in self._shares if share.done is not None]

    async def start(self, make_order: MakeOrder, token_bytes: int) -> tuple[ActivationSlots, int]:
        """Start the shares, the last stage first; each waits for the pages of the one after it.

        Returns:
            The slots of stage 1, and the tokens of a chunk that fits into the slots of all.

        Raises:
            PrefillRefused: a stage refused, failed, or is lost.
        """
        slots: ActivationSlots | None = None
        chunk_tokens: list[int] = []
        for stage in reversed(range(1, len(self._shares) + 1)):
            slots = await self._start_share(stage, make_order(stage, slots), token_bytes)
            chunk_tokens.append(slots.slot_bytes // token_bytes)
        assert slots is not None, "a group has two stages at least"
        return slots, min(chunk_tokens)

    async def _start_share(
        self, stage: int, order: StartShare, token_bytes: int
    ) -> ActivationSlots:
        """Start one share, and wait until it has pages and slots."""
        share = self._share(stage)
        share.link = await self._links.link(share.address)
        share.link.listen(self._request_id, lambda said: self._on_message(stage, said))
        share.link.send(order)
        await self._until(lambda: share.slots is not None)
        assert share.slots is not None
        if fault := _slots_fault(share.slots, share.address, token_bytes):
            raise PrefillRefused(self._failed(share, fault))
        return share.slots

    def send_to_next(self, message: ChunkSent) -> None:
        """Tell stage 1 of a chunk that stage 0 has written."""
        self._tell(1, message)

    async def wait_done(self) -> int:
        """Wait until the KV of all further stages is in the landing.

        Returns:
            The first token, which the last stage has chosen.

        Raises:
            PrefillRefused: a stage failed, or is lost.
        """
        await self._until(lambda: all(share.done is not None for share in self._shares))
        token = self.dones[-1].first_token
        if token is None:
            share = self._shares[-1]
            raise PrefillRefused(self._failed(share, "it is the last stage, and chose no token"))
        return token

    async def wait_kept(self) -> bool:
        """Wait until no further stage writes anything; return whether all wrote their blocks."""
        await self._until_over()
        return all(
            isinstance(share.end, ShareKept) and share.end.is_written for share in self._shares
        )

    async def stop(self, limit_s: float) -> bool:
        """Stop the shares that are not over, and wait for them.

        Args:
            limit_s: seconds to wait at the most.

        Returns:
            Whether a stage may still write to the landing.
        """
        self._is_stopping = True
        for share in self._shares:
            if share.link is not None and share.end is None:
                share.link.send(StopShare(request_id=self._request_id))
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._until_over()
        for share in self._shares:
            if share.link is not None:
                share.link.forget(self._request_id)
        return any(share.may_write for share in self._shares)

    def _share(self, stage: int) -> _Share:
        return self._shares[stage - 1]

    def _tell(self, stage: int, message: ChunkSent | SlotFreed) -> None:
        link = self._share(stage).link
        if link is not None:
            link.send(message)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while True:
            if self._failure is not None:
                raise PrefillRefused(self._failure)
            if condition():
                return
            self._changed.clear()
            await self._changed.wait()

    async def _until_over(self) -> None:
        while any(share.link is not None and share.end is None for share in self._shares):
            self._changed.clear()
            await self._changed.wait()

    def _on_message(self, stage: int, said: ToFirstStage | PeerUnreachable) -> None:
        share = self._share(stage)
        match said:
            case ShareReady(slots=slots):
                share.slots = slots
            case ChunkSent():
                # Only to the stage after the sender: it has no say over others' slots.
                if said.stage == stage + 1 and stage < len(self._shares):
                    self._tell(stage + 1, said)
            case SlotFreed() if said.stage == stage == 1:
                self._post(NextSlotFreed(self._request_id, said.slot))
            case SlotFreed():
                if said.stage == stage:
                    self._tell(stage - 1, said)
            case ShareProgress():
                pass
            case ShareDone():
                share.done = share.done or said
            case ShareKept():
                share.end = share.end or said
                if share.done is None:
                    self._fail(self._failed(share, "it ended its share without being done"))
            case ShareEnded():
                share.end = share.end or said
                self._fail(self._ended(share, said))
            case PeerUnreachable():
                share.end = share.end or said
                if share.done is None or not self.dones_are_complete:
                    self._fail(self._failed(share, f"it can't be reached: {said}"))
            case _:
                assert_never(said)
        self._changed.set()

    @property
    def dones_are_complete(self) -> bool:
        """Return whether all further stages have written their KV to the landing."""
        return len(self.dones) == len(self._shares)

    def _fail(self, failure: PrefillFailure) -> None:
        """End the prompt, unless all its KV has landed: then only its blocks may not be kept."""
        if self._failure is None and not self._is_stopping and not self.dones_are_complete:
            self._failure = failure
            self._post(StepFailed(self._request_id, failure))

    def _ended(self, share: _Share, ended: ShareEnded) -> PrefillFailure:
        reason = f"{share.address.worker_id}: {ended.reason or 'it stopped its share'}"
        culprit = ended.culprit or share.address.worker_id
        return PrefillFailure(reason, ended.retryable, culprit, ended.invalid, ended.code)

    def _failed(self, share: _Share, fault: str) -> PrefillFailure:
        stage = self._shares.index(share) + 1
        worker = share.address.worker_id
        return PrefillFailure(
            f"stage {stage}, {worker}: {fault}",
            retryable=True,
            culprit=worker,
            code=error_codes.PEER_FAILED,
        )


def _slots_fault(slots: ActivationSlots, address: StageAddress, token_bytes: int) -> str:
    """Say why a stage's slots can't be written to; empty if they can."""
    if slots.region.segment != address.worker_id:
        return f"its slots are memory of {slots.region.segment!r}"
    return slots_fault(slots, token_bytes)


def slots_fault(slots: ActivationSlots, token_bytes: int) -> str:
    """Say why slots do not fit activations of so many bytes a token; empty if they do."""
    if slots.token_bytes != token_bytes:
        return f"a token's activations have {slots.token_bytes} bytes there, {token_bytes} here"
    if slots.slot_bytes < token_bytes:
        return f"a slot has {slots.slot_bytes} bytes: not one token of {token_bytes} fits"
    if (end := max(slots.offsets) + slots.slot_bytes) > slots.region.length:
        return f"a slot ends at byte {end}, its region has {slots.region.length}"
    return ""
