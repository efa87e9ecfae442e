"""State of one request at a prefill worker, changed by `PrefillMachine` alone."""

from dataclasses import dataclass, field
from enum import Enum

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import PrefillTimes, StartPrefill
from halfmoon_scheduling.prefill.chunk_flow import ChunkFlow
from halfmoon_scheduling.prefill.prefill_commands import PrefillEnding
from halfmoon_scheduling.prefill.prompt_share import WHOLE_PROMPT, PromptShare


class PrefillPhase(Enum):
    """The phases of a request; the diagram in `prefill_machine` connects them."""

    #: It has a place in the queue and no pages.
    WAITING = "waiting"
    #: It has pages; `FetchPrefix` is being performed.
    LEASING = "leasing"
    #: `ReserveRoom` is being performed.
    RESERVING = "reserving"
    #: `StartStages` is being performed.
    STARTING = "starting"
    #: Everything is asked for; it waits for the last byte of its prefix.
    FETCHING = "fetching"
    #: The queue has it among those to compute, perhaps in the pass under way.
    COMPUTING = "computing"
    #: All chunks are computed; its first token is delayed.
    CHOOSING = "choosing"
    #: It has its first token; `SettleTransfers` is being performed.
    SETTLING = "settling"
    #: `ReportDone` is being performed.
    REPORTING = "reporting"
    #: `KeepBlocks` is being performed.
    KEEPING = "keeping"
    #: It has ended while a pass is under way that touches its pages.
    STOPPING = "stopping"
    #: `ReleaseHoldings` is being performed.
    RELEASING = "releasing"


#: Phases of a request that has not begun to end and still holds a place in the queue.
QUEUED_PHASES = frozenset(
    {
        PrefillPhase.WAITING,
        PrefillPhase.LEASING,
        PrefillPhase.RESERVING,
        PrefillPhase.STARTING,
        PrefillPhase.FETCHING,
        PrefillPhase.COMPUTING,
    }
)


@dataclass(eq=False, slots=True)
class PrefillRequest:
    """One prompt to prefill."""

    start: StartPrefill
    n_tokens: int
    arrived_s: float
    share: PromptShare = WHOLE_PROMPT
    #: Blocks that stage 0 has leased for this further stage.
    n_leased: int = 0
    #: Blocks that are in the pages before anything is fetched: in a landing, those of others.
    n_held_blocks: int = 0
    phase: PrefillPhase = PrefillPhase.WAITING
    #: Pages of the pool from `LEASING` to the end; in no other request's.
    pages: list[int] = field(default_factory=list)
    #: Tokens whose KV is not computed; a guess until `PrefixLeased`.
    n_cached: int = 0
    #: Whether the leased blocks are all in the pages; true when there are none.
    prefix_fetched: bool = True
    #: Whether the home kvstore holds room for its new blocks.
    has_room: bool = False
    #: Block from which room is reserved while the prefix is leased; None: it is not.
    reserved_from: int | None = None
    #: Only of a prompt that is computed in stages.
    flow: ChunkFlow = field(default_factory=ChunkFlow)
    first_token: int | None = None
    ending: PrefillEnding = None
    #: When it got pages; when its first pass began, its first token was chosen and its transfers
    #: were settled; when `PrefillDone` was to be sent.
    paged_s: float = 0.0
    computing_since_s: float | None = None
    computed_s: float = 0.0
    settled_s: float | None = None
    #: Seconds that it waited for the answers of kvstores before its first pass.
    asking_s: float = 0.0
    #: Seconds of the passes that it was in; of these, seconds of waits for cached layers.
    compute_s: float = 0.0
    layers_wait_s: float = 0.0

    @property
    def request_id(self) -> RequestId:
        """The id of this try."""
        return self.start.request_id

    def max_cached_blocks(self, block_size: int) -> int:
        """Return how many blocks may come from a cache: all but those of the last token.

        At least one token is computed. A prompt's scores are made in its tokens' own forward
        passes, so where they are wanted no block may be cached.
        """
        if not self.share.is_first:
            return self.n_leased
        if self.start.sampling.prompt_logprobs is not None:
            return 0
        n_blocks = 0 if self.start.cached is None else self.start.cached.n_blocks
        return min(max(n_blocks, self.n_held_blocks), (self.n_tokens - 1) // block_size)

    def times(self, now: float) -> PrefillTimes:
        """Split the time since the arrival into queue, fetch, compute and transfer."""
        fetch_s = self.asking_s + self.layers_wait_s
        compute_s = self.compute_s - self.layers_wait_s
        drain_s = now - self.computed_s
        queue_s = now - self.arrived_s - fetch_s - compute_s - drain_s
        return PrefillTimes(max(0.0, queue_s), fetch_s, compute_s, drain_s)
