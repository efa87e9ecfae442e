"""Tell a request that takes workers down from one that was beside a rack that died.

Workers that share a power supply, a switch or a conductor that stood still are lost together. So
losses within `EVENT_S` of the first one are one *event*:

- Requests are tried again at once after their first loss. The second worker of an event may have
  been dead before it got the request. So no third try begins before the event is over.
- An event in which a worker was lost that had nothing of a request is not charged to the request.
  Several requests may each take a worker down at one moment and excuse one another, so that counts
  `MAX_EXCUSES` times.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.events import Casualty

#: Seconds from the first loss of an event to its last one. A closed socket is seen at once, hosts
#: that fall silent together within a second of each other.
EVENT_S = 2.0
#: Events that a request is excused for.
MAX_EXCUSES = 2
#: Losses that are remembered; an older one is charged to all that it computed.
MAX_LOSSES = 1024

_Start = tuple[WorkerId, int]


@dataclass
class _Event:
    """Losses that came together."""

    first_s: float
    lost: set[_Start] = field(default_factory=set)


class LossHistory:
    """Keep which workers were lost together."""

    def __init__(self) -> None:
        #: The last event in which a start of a worker was lost, the oldest loss first.
        self._event_of: OrderedDict[_Start, _Event] = OrderedDict()
        self._last = _Event(-inf)

    def note(self, worker_id: WorkerId, generation: int, now: float) -> bool:
        """Note that a worker is lost; return whether an event begins with that."""
        begins = now > self._last.first_s + EVENT_S
        if begins:
            self._last = _Event(now)
        start = (worker_id, generation)
        self._last.lost.add(start)
        self._event_of[start] = self._last
        self._event_of.move_to_end(start)
        if len(self._event_of) > MAX_LOSSES:
            self._event_of.popitem(last=False)
        return begins

    def charges(self, casualties: Sequence[Casualty]) -> tuple[Casualty, ...]:
        """Return those of a request's casualties that it may have caused."""
        own = {(each.worker_id, each.generation) for each in casualties}
        excused: list[_Event] = []
        for start in own:
            event = self._event_of.get(start)
            if event is not None and event not in excused and not event.lost <= own:
                excused.append(event)
        excused = sorted(excused, key=lambda event: event.first_s)[:MAX_EXCUSES]
        return tuple(
            each
            for each in casualties
            if self._event_of.get((each.worker_id, each.generation)) not in excused
        )

    def settled_s(self, casualties: Sequence[Casualty]) -> float:
        """Return when the last event of a request's casualties is over."""
        events = (self._event_of.get((each.worker_id, each.generation)) for each in casualties)
        return max((each.first_s + EVENT_S for each in events if each is not None), default=-inf)
