"""Queue requests that wait for decode pages, and tell when to place the first one again.

Only the first request may be placed, so the queue watches for that one alone. A placement that
finds no decode worker with room leaves a `PageShortage`: the missing pages, and the workers that
could give them. A load report then costs one comparison, for the worker that sent it. The first
request is placed again when

- one of those workers has enough free pages,
- workers join or leave, or
- another request becomes the first.
"""

from dataclasses import dataclass

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.admission.rank_queue import RankQueue
from halfmoon_scheduling.cluster.decode_pool import DecodePool
from halfmoon_scheduling.requests.request_state import RequestRank


@dataclass(frozen=True, slots=True)
class PageShortage:
    """The pages that a placement did not find."""

    rank: RequestRank
    #: Pages that one worker must have free.
    n_pages: int
    #: Decode workers that could take the request if they had the pages.
    takers: frozenset[WorkerId]


class PageQueue(RankQueue):
    """Hold the requests that wait for decode pages."""

    def __init__(self, decodes: DecodePool) -> None:
        super().__init__()
        self._decodes = decodes
        #: Of the first request at its last placement; None: place it again.
        self._shortage: PageShortage | None = None

    def set_shortage(self, shortage: PageShortage) -> None:
        """Note that a placement found no room, if it was one of the first request."""
        if shortage.rank == self.first:
            self._shortage = shortage

    @property
    def shortage(self) -> PageShortage | None:
        """Return what the first request lacks; None: it is to be placed again, or none waits."""
        shortage = self._shortage
        return shortage if shortage is not None and shortage.rank == self.first else None

    def reconsider(self) -> None:
        """Have the first request placed again, since something besides free pages has changed."""
        self._shortage = None

    def may_retry(self) -> bool:
        """Return whether another placement of the first request may find room.

        The queue must not be empty.
        """
        if (shortage := self.shortage) is None:
            return True
        return any(
            worker in shortage.takers and self._decodes.has_room(worker, shortage.n_pages)
            for worker in self._decodes.take_workers_with_more_room()
        )
