"""Define a placement mode: one object that decides how a prefill worker is chosen, and says why.

A mode answers three questions. Which cached prefix may a worker use: the one in its own kvstore,
or the longest one anywhere? Which of the predicted estimates is the best? And how is that choice
explained to an operator? Everything else asks the mode: settings, `place`, `/debug/decisions` and
the simulator's reports. A new mode is a module in `halfmoon_scheduling.placement.modes`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple

from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_scheduling.placement.durations import describe_seconds
from halfmoon_scheduling.placement.estimates import Estimate, Placement, PlacementRequest
from halfmoon_scheduling.registry import Registry

#: Shortest difference of two times that an explanation mentions, seconds.
_LEAST_MENTIONED_S = 0.0005

#: The limit of a request's time to first token at a prefill worker, seconds; None: no limit.
TtftSlo = Callable[[WorkerId], float | None]


class PrefixSource(Enum):
    """The cached prefix that a prefill worker uses when another kvstore holds a longer one."""

    #: The prefix in the worker's own kvstore.
    OWN = "own"
    #: The longest prefix, fetched from the kvstore that holds it.
    LONGEST = "longest"
    #: Whichever of the two brings the first token sooner.
    FASTER = "faster"


@dataclass(frozen=True, slots=True)
class ModeSettings:
    """Settings of placement modes; each mode reads those that it needs."""

    #: Ratio of the longest prefix anywhere to the own one up to which the own one is used.
    kvcache_balancing_threshold: float = 1.5
    #: Seed of random choices.
    seed: int = 0


class Choice(NamedTuple):
    """The chosen row, and the worker that the mode preferred before it compared rows."""

    row: Estimate
    preferred: WorkerId | None = None


class PlacementMode(ABC):
    """Choose a prefill worker from predicted times, and explain the choice.

    Each conductor opens one object of its mode. The object may remember earlier requests, but it
    must depend on nothing else: a journal replays to the same placements.
    """

    #: The name in settings, options and reports.
    name: ClassVar[str]
    #: One line for help texts and reports: which worker is chosen, and which prefix it uses.
    summary: ClassVar[str]
    #: Whether rows are compared by time to first token. A prefill group or a decode worker may
    #: replace the chosen row only in such modes, because their gain is a sooner first token.
    compares_ttft: ClassVar[bool] = True
    #: By which predicted time rows are ranked; see `rank`. A mode that states one chooses the first
    #: row by rank, that of `preferred_worker`, or that of `drawn_index`. So `choose` gets only the
    #: best rows and the preferred one, and is not called where a row is drawn.
    #: None: it gets the rows of all workers.
    ranks_by: ClassVar[Literal["ttft", "queue"] | None] = None

    def __init__(self, settings: ModeSettings) -> None:
        """Open the mode for one conductor."""
        self._settings = settings

    @abstractmethod
    def prefix_source(self, own_blocks: int, longest_blocks: int) -> PrefixSource:
        """Return which cached prefix a worker uses. Called only where `longest_blocks` is more.

        Args:
            own_blocks: blocks of the prompt's prefix in the worker's own kvstore.
            longest_blocks: blocks of the longest prefix that any kvstore holds.
        """

    @abstractmethod
    def choose(
        self, job: PlacementRequest, rows: Sequence[Estimate], ttft_slo_s: TtftSlo
    ) -> Choice:
        """Return the best row.

        Args:
            job: the request.
            rows: estimates of prefill workers that can take it, at least one, by their ids: of all
                workers, or as `ranks_by` says.
            ttft_slo_s: the limit of its time to first token at a worker.
        """

    def preferred_worker(self, job: PlacementRequest) -> WorkerId | None:
        """Return the worker whose row `choose` needs, however late it is; None: no such one."""
        return None

    def drawn_index(self, job: PlacementRequest, n_candidates: int) -> int | None:
        """Return the candidate to choose, whatever its row; None: `choose` compares rows.

        Args:
            job: the request.
            n_candidates: prefill workers that can take it, at least one, in order of their ids.
        """
        return None

    def on_prefill_done(  # noqa: B027 - a hook: most modes keep no memory
        self, block_hashes: Sequence[BlockHash], worker_id: WorkerId
    ) -> None:
        """Learn that a worker has prefilled a request. Modes without memory ignore it.

        Args:
            block_hashes: chained hashes of the prompt's full blocks.
            worker_id: the prefill worker, or the first stage of a prefill group.
        """

    @classmethod
    @abstractmethod
    def explain_choice(cls, placement: Placement) -> str:
        """Say why the chosen one of several prefill workers was chosen; its name stands before."""

    @classmethod
    @abstractmethod
    def explain_rejection(cls, row: Estimate, placement: Placement) -> str:
        """Say why a prefill worker's row, which differs from the chosen one, was not chosen."""


_BY_TTFT = attrgetter("ttft_s", "queue_s", "worker_id")
_BY_QUEUE = attrgetter("queue_s", "worker_id")


def rank_of(mode: type[PlacementMode] | PlacementMode) -> Callable[[Estimate], tuple[Any, ...]]:
    """Return what orders rows from the best to the worst; its first part is a time.

    Rows of modes without such an order are shown by their time to first token.
    """
    return _BY_QUEUE if mode.ranks_by == "queue" else _BY_TTFT


#: All placement modes; complete once `halfmoon_scheduling.placement.modes` is imported.
PLACEMENT_MODES: Registry[type[PlacementMode]] = Registry("placement mode")


def explain_later_ttft(row: Estimate, chosen: Estimate) -> str:
    """Say how much later a row's first token would come, and which parts take longer."""
    parts = [
        (row.queue_s - chosen.queue_s, "queue"),
        (row.transfer_s - chosen.transfer_s, "transfer"),
        (row.prefill_s - chosen.prefill_s, "prefill"),
    ]
    longer = [
        f"{name} +{describe_seconds(seconds)}"
        for seconds, name in sorted(parts, reverse=True)
        if seconds >= _LEAST_MENTIONED_S
    ]
    reasons = f" ({', '.join(longer)})" if longer else ""
    return f"first token {describe_seconds(row.ttft_s - chosen.ttft_s)} later{reasons}"
