"""Divide a request's time to first token into stages that add up to it.

    read ─tokenize─▶ arrived ─retry─▶ arrived again ─place─▶ decode asked ─reserve─▶ prefill sent
      ─messages, queue, fetch, prefill, transfer─▶ prefill's answer ─deliver─▶ first token read

Each moment belongs to one stage. The conductor's clock times the upper row and the end. Prefill's
own clock (`PrefillTimes`) times what is between the command to prefill and its answer, so no two
machines' clocks are compared. The rest of that round trip is `messages`. The first token is
prefill's, so no decode step is included: `halfmoon_first_decode_seconds` is the time from it to the
second token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import (
    AnyMessage,
    DecodeReserved,
    PrefillDone,
    PrefillTimes,
    ReserveDecode,
)
from halfmoon_scheduling.commands import AnyCommand, Send
from halfmoon_scheduling.events import AnyEvent, MessageReceived, RequestArrived

#: In the order in which a request passes them.
TtftStage = Literal[
    "tokenize",  # checking the body, tokenizing the prompt
    "retry",  # failed tries; 0 for nearly all requests
    "place",  # waiting for admission and for pages, at the conductor
    "reserve",  # asking the decode worker for pages
    "messages",  # to the prefill worker and back, without its own time
    "queue",  # at prefill: waiting for its turn and for pages
    "fetch",  # at prefill: waiting for kvstores' answers and for cached layers
    "prefill",  # at prefill: forward passes
    "transfer",  # at prefill: the last bytes to decode
    "deliver",  # from prefill's answer until the first token is written to the client
]
TTFT_STAGES: tuple[TtftStage, ...] = get_args(TtftStage)
#: Stages in which the request is worked on; in the others it waits or is transmitted.
ACTIVE_STAGES: tuple[TtftStage, ...] = ("fetch", "prefill", "transfer")


@dataclass(slots=True)
class TtftTimestamps:
    """Timestamps of one request up to its first token, in seconds on the conductor's clock."""

    #: Arrival of the first try; None: not yet.
    first_s: float | None = None
    #: Arrival of the last try; when its decode worker was asked for pages; when it had them.
    arrived_s: float = 0.0
    reserve_sent_s: float = 0.0
    reserved_s: float = 0.0
    #: Prefill's answer, and prefill's own times; None until then.
    done_s: float = 0.0
    prefill: PrefillTimes | None = None

    def stages(self) -> dict[str, float] | None:
        """Return the seconds of each stage from arrival to prefill's answer; None before that."""
        if self.prefill is None or self.first_s is None:
            return None
        times = self.prefill
        at_prefill_s = times.queue_s + times.fetch_s + times.compute_s + times.transfer_s
        return {
            "retry": self.arrived_s - self.first_s,
            "place": self.reserve_sent_s - self.arrived_s,
            "reserve": self.reserved_s - self.reserve_sent_s,
            "messages": max(0.0, self.done_s - self.reserved_s - at_prefill_s),
            "queue": times.queue_s,
            "fetch": times.fetch_s,
            "prefill": times.compute_s,
            "transfer": times.transfer_s,
        }


class TtftRecorder:
    """Record these timestamps, as a recorder of the shell."""

    def __init__(self, find: Callable[[RequestId], TtftTimestamps | None]) -> None:
        """Record the tries that `find` knows.

        Args:
            find: returns the timestamps of a current try with a client, else None.
        """
        self._find = find

    def record(self, now: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
        """Record the timestamps of one call of the core; see `shell.Recorder`."""
        if isinstance(event, RequestArrived):
            if (timestamps := self._find(event.request.request_id)) is not None:
                timestamps.arrived_s, timestamps.prefill = now, None
                if timestamps.first_s is None:
                    timestamps.first_s = now
        elif isinstance(event, MessageReceived):
            self._on_message(now, event.message)
        for command in commands:  # of any request: freed pages may start others
            if not isinstance(command, Send) or not isinstance(command.message, ReserveDecode):
                continue
            if (timestamps := self._find(command.message.request_id)) is not None:
                timestamps.reserve_sent_s = now

    def _on_message(self, now: float, message: AnyMessage) -> None:
        if not isinstance(message, DecodeReserved | PrefillDone):
            return
        if (timestamps := self._find(message.request_id)) is None:
            return
        if isinstance(message, DecodeReserved):
            timestamps.reserved_s = now
        else:
            timestamps.done_s = now
            timestamps.prefill = message.times or PrefillTimes(
                message.queue_s, 0.0, message.compute_s, message.drain_s
            )
