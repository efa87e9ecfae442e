"""Keep the workers that are registered and that this conductor can't reach, each with the reason.

`WorkerLinks` writes here; the page, the metrics, `/ready` and the errors of clients read. The core
knows nothing of such workers: they have never joined, or are lost.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.observability.metrics import MetricSnapshot, by_label

#: Seconds without an answer after which a worker counts as unreachable: longer than one attempt to
#: connect, so that its reason is known.
UNREACHABLE_S = 7.0
#: Seconds between two log lines about one worker.
_LOG_AGAIN_S = 300.0
#: Workers that an error names.
_MAX_NAMED = 3
#: Longest reason that is kept, in characters.
_MAX_REASON = 500
#: The attempt that is under way is the first one.
_NOT_YET = "it has not answered yet"
#: The connection is up, and the worker says nothing, or speaks for another one.
NO_WELCOME = "it takes the connection and does not answer the hello"
WRONG_WORKER = "another worker answers there: "
_ADDRESS_ADVICE = (
    "start the worker with --advertise-host (HALFMOON_ADVERTISE_HOST) set to an address at which "
    "the conductor reaches it, and let its ports through"
)
_KEY_ADVICE = "give the worker and the conductor the same cluster key (HALFMOON_CLUSTER_KEY_FILE)"
_WORKER_ADVICE = "look into the worker's log, and start it again"

log = structlog.get_logger()


@dataclass(frozen=True)
class UnreachableWorker:
    """A worker whose record lives and that does not answer."""

    info: WorkerInfo
    #: Seconds since its record was found, or since it was lost.
    for_s: float
    reason: str

    @property
    def text(self) -> str:
        """The worker, its address and the reason, in one line."""
        return f"{self.info.worker_id} at {self.info.commands} ({self.reason})"

    @property
    def advice(self) -> str:
        """The way out that the reason points to."""
        return _advice(self.reason)


@dataclass
class _Silence:
    """One worker from the moment at which it should answer until it does."""

    info: WorkerInfo
    since_s: float
    reason: str
    #: Time of the last log line; None: there was none.
    logged_s: float | None = None


class UnreachableWorkers:
    """Note what each attempt to reach a worker comes to."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Note nothing yet; `now` returns seconds that only grow."""
        self._silent: dict[WorkerId, _Silence] = {}
        self._now = now

    def on_dial(self, info: WorkerInfo) -> None:
        """Note that a worker is being dialled, so that it should answer soon."""
        if info.worker_id not in self._silent:
            self._silent[info.worker_id] = _Silence(info, self._now(), _NOT_YET)

    def on_lost(self, info: WorkerInfo, reason: str) -> None:
        """Note that a worker answers no more, although its record lives."""
        self._silent[info.worker_id] = _Silence(info, self._now(), reason[:_MAX_REASON])

    def on_failure(self, worker_id: WorkerId, reason: str) -> None:
        """Note why the latest attempt failed; of a worker that is not expected nothing is noted."""
        if (silence := self._silent.get(worker_id)) is not None:
            silence.reason = reason[:_MAX_REASON]

    def on_reached(self, worker_id: WorkerId) -> None:
        """Note that a worker answers."""
        silence = self._silent.pop(worker_id, None)
        if silence is not None and silence.logged_s is not None:
            seconds = round(self._now() - silence.since_s, 1)
            log.info(
                "worker_reachable_again",
                worker_id=worker_id,
                address=silence.info.commands,
                seconds=seconds,
            )

    def on_gone(self, worker_id: WorkerId) -> None:
        """Forget a worker whose record is gone, that is refused, or that rests."""
        self._silent.pop(worker_id, None)

    def log_new(self) -> None:
        """Log each worker that has become unreachable, and again now and then."""
        now_s = self._now()
        for worker_id, silence in self._silent.items():
            if now_s < silence.since_s + UNREACHABLE_S:
                continue
            if silence.logged_s is None or now_s >= silence.logged_s + _LOG_AGAIN_S:
                silence.logged_s = now_s
                log.warning(
                    "worker_unreachable",
                    worker_id=worker_id,
                    role=silence.info.role,
                    address=silence.info.commands,
                    seconds=round(now_s - silence.since_s, 1),
                    reason=silence.reason,
                    advice=_advice(silence.reason),
                )

    def found(self) -> list[UnreachableWorker]:
        """Return the workers that have been unreachable for long enough to say so, by name."""
        now_s = self._now()
        late = [each for each in self._silent.values() if now_s >= each.since_s + UNREACHABLE_S]
        late.sort(key=lambda each: each.info.worker_id)
        return [UnreachableWorker(each.info, now_s - each.since_s, each.reason) for each in late]

    def hint(self, roles: Sequence[str]) -> str:
        """Return which workers of these roles can't be reached, and the way out; "" for none."""
        found = [each for each in self.found() if each.info.role in roles]
        if not found:
            return ""
        named = "; ".join(each.text for each in found[:_MAX_NAMED])
        more = f"; {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
        ways_out = " or ".join(dict.fromkeys(each.advice for each in found))
        return f"Registered, but out of the conductor's reach: {named}{more}. To do: {ways_out}."

    def metrics(self) -> MetricSnapshot:
        """Return the number of unreachable workers by role."""
        n_of = dict.fromkeys(("prefill", "decode", "kvstore"), 0)
        for each in self.found():
            n_of[each.info.role] += 1
        return {
            "halfmoon_unreachable_workers": (
                "Workers that are registered and that this conductor can't reach, by role.",
                by_label("role", n_of),
            )
        }


def _advice(reason: str) -> str:
    if "cluster key" in reason:
        return _KEY_ADVICE
    return _WORKER_ADVICE if reason.startswith((NO_WELCOME, WRONG_WORKER)) else _ADDRESS_ADVICE
