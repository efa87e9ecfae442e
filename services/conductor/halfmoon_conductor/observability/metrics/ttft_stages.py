"""Where a request's time to its first token goes: stages that add up to it.

    read ─tokenize─▶ arrived ─retry─▶ arrived again ─place─▶ decode asked ─reserve─▶ prefill told
      ─messages, queue, fetch, prefill, transfer─▶ prefill's answer ─deliver─▶ first token read

Each moment is in one stage: what the request waited for then. The conductor's clock gives the
moments in the upper row and the end; what was between the command to prefill and its answer,
prefill's own clock (`PrefillTimes`): no two machines' clocks are compared, and what the round
trip took beyond that is `messages`. The first token is prefill's, so a decode step is no part
of it: `halfmoon_first_decode_seconds` is the time from there to the second token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import DecodeReserved, PrefillDone, PrefillTimes, ReserveDecode
from halfmoon_scheduling.commands import AnyCommand, Send
from halfmoon_scheduling.events import AnyEvent, MessageReceived, RequestArrived

#: In the order in which a request meets them.
TtftStage = Literal[
    "tokenize",  # the body checked, the prompt made tokens
    "retry",  # tries that came to nothing; 0 for nearly all
    "place",  # waiting for admission and for room, at the conductor
    "reserve",  # the decode worker asked for pages, until it has answered
    "messages",  # to the prefill worker and back, without what it took itself
    "queue",  # at prefill: its turn, pages
    "fetch",  # at prefill: kvstores' answers, cached layers that were not there yet
    "prefill",  # at prefill: forward passes
    "transfer",  # at prefill: the last bytes on their way to decode
    "deliver",  # from prefill's answer until the first token is written to the client
]
TTFT_STAGES: tuple[TtftStage, ...] = get_args(TtftStage)
#: Those in which somebody works on the request; in the others it waits, or is on its way.
ACTIVE_STAGES: tuple[TtftStage, ...] = ("fetch", "prefill", "transfer")


@dataclass(slots=True)
class TtftTimestamps:
    """When one request's first token passed what, seconds on the conductor's clock."""

    #: The first try arrived; None: not yet.
    first_s: float | None = None
    #: The last try arrived, its decode worker was asked for pages, and had them.
    arrived_s: float = 0.0
    asked_s: float = 0.0
    reserved_s: float = 0.0
    #: Prefill's answer, and its own account of the time; None until then.
    done_s: float = 0.0
    prefill: PrefillTimes | None = None

    def stages(self) -> dict[str, float] | None:
        """Seconds of each stage from arrival to prefill's answer; None before that."""
        if self.prefill is None or self.first_s is None:
            return None
        there = self.prefill
        at_prefill_s = there.queue_s + there.fetch_s + there.compute_s + there.transfer_s
        return {
            "retry": self.arrived_s - self.first_s,
            "place": self.asked_s - self.arrived_s,
            "reserve": self.reserved_s - self.asked_s,
            "messages": max(0.0, self.done_s - self.reserved_s - at_prefill_s),
            "queue": there.queue_s,
            "fetch": there.fetch_s,
            "prefill": there.compute_s,
            "transfer": there.transfer_s,
        }


class TtftRecorder:
    """Notes these moments, as a recorder of the shell."""

    def __init__(self, find: Callable[[RequestId], TtftTimestamps | None]) -> None:
        """`find` gives the moments of a try, if it is the one under way and has a client."""
        self._find = find

    def watch(self, now: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
        """See `shell.Recorder`."""
        match event:
            case RequestArrived(request=request):
                if (moments := self._find(request.request_id)) is not None:
                    moments.arrived_s, moments.prefill = now, None
                    if moments.first_s is None:
                        moments.first_s = now
            case MessageReceived(message=DecodeReserved(request_id=request_id)):
                if (moments := self._find(request_id)) is not None:
                    moments.reserved_s = now
            case MessageReceived(message=PrefillDone() as done):
                if (moments := self._find(done.request_id)) is not None:
                    moments.done_s = now
                    moments.prefill = done.times or PrefillTimes(
                        done.queue_s, 0.0, done.compute_s, done.drain_s
                    )
            case _:
                pass
        for command in commands:  # of any request: room was made, say
            if not isinstance(command, Send) or not isinstance(command.message, ReserveDecode):
                continue
            if (moments := self._find(command.message.request_id)) is not None:
                moments.asked_s = now
