"""Notice that no conductor has connected to a worker, and say why.

    halfmoon/conductors/<conductor id>   {"conductor_id": …, "unreachable": {worker: reason}}

A conductor keeps such a record under a lease. So a worker can tell a conductor that does not reach
it from one that is not there. Conductors of other teams need not write it.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated

import msgspec
import structlog
from msgspec import Meta

from halfmoon_metadata.store_interface import MetadataError, MetadataStore
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.observability.metrics import MetricSnapshot

CONDUCTORS = "halfmoon/conductors/"
#: Unreachable workers in one conductor's record, and the longest reason, in characters.
MAX_UNREACHABLE = 1000
MAX_REASON_CHARS = 300
_LOOK_S = 1.0
#: Seconds without a conductor after which the conductors' records are read, again and again.
ASK_AFTER_S = 10.0
_ASK_EVERY_S = 5.0
#: Seconds without a conductor after which this is said even if no conductor gives a reason: one
#: that starts at the same time may load a tokenizer first.
SAY_AFTER_S = 30.0
_LOG_AGAIN_S = 300.0
_MAX_RECORD_BYTES = 1024 * 1024
_WAY_OUT = (
    "set --advertise-host (HALFMOON_ADVERTISE_HOST) to an address of this worker that the "
    "conductor reaches, and let its ports through"
)

_log = structlog.get_logger(__name__)


class ConductorRecord(msgspec.Struct, frozen=True):
    """The record of one conductor."""

    conductor_id: Annotated[str, Meta(min_length=1, max_length=128)]
    #: Registered workers that it can't reach, by name, each with the reason.
    unreachable: dict[str, str] = {}


_decoder: msgspec.json.Decoder[ConductorRecord] = msgspec.json.Decoder(ConductorRecord)


class ConductorWatch:
    """Watch whether a registered worker has a conductor.

    Args:
        store: holds the conductors' records.
        info: the worker's record.
        n_conductors: returns the number of conductors that are connected to it.
        report: called with what is wrong, and with "" once that is over.
        now: returns seconds that only grow.
    """

    def __init__(
        self,
        store: MetadataStore,
        info: WorkerInfo,
        n_conductors: Callable[[], int],
        report: Callable[[str], None],
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._info = info
        self._n_conductors = n_conductors
        self._report = report
        self._now = now
        self._since_s = now()
        self._asked_s = float("-inf")
        #: What was last said, and when; empty: there is nothing to say.
        self._problem = ""
        self._logged_s = float("-inf")

    async def run(self) -> None:
        """Look about once a second until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Look once; log and report what has changed."""
        now_s = self._now()
        if self._n_conductors():
            self._since_s = now_s
            if self._problem:
                self._problem = ""
                _log.info("conductor_connected", worker_id=self._info.worker_id)
                self._report("")
            return
        silent_s = now_s - self._since_s
        if silent_s < ASK_AFTER_S or now_s < self._asked_s + _ASK_EVERY_S:
            return
        self._asked_s = now_s
        try:
            records = await asyncio.to_thread(self._store.list, CONDUCTORS)
        except MetadataError:
            return  # the renewal of the worker's record says so
        conductors = [each for each in map(_read, records.values()) if each is not None]
        if problem := _explain(self._info, conductors, silent_s):
            self._say(problem, now_s)

    def metrics(self) -> MetricSnapshot:
        """Return the number of connected conductors."""
        return {
            "halfmoon_worker_conductors": (
                "Conductors that are connected to this worker.",
                self._n_conductors(),
            )
        }

    def _say(self, problem: str, now_s: float) -> None:
        if problem != self._problem or now_s >= self._logged_s + _LOG_AGAIN_S:
            self._logged_s = now_s
            _log.warning(
                "no_conductor",
                worker_id=self._info.worker_id,
                address=self._info.commands,
                problem=problem,
            )
        if problem != self._problem:
            self._problem = problem
            self._report(problem)


def _explain(info: WorkerInfo, conductors: list[ConductorRecord], silent_s: float) -> str:
    """Return why no conductor is connected; "" while that may still be a matter of time."""
    for conductor in conductors:
        if reason := conductor.unreachable.get(info.worker_id):
            return (
                f"{conductor.conductor_id} can't reach this worker at {info.commands}: "
                f"{reason[:MAX_REASON_CHARS]}; {_WAY_OUT}"
            )
    if silent_s < SAY_AFTER_S:
        return ""
    if conductors:
        names = ", ".join(sorted(each.conductor_id for each in conductors)[:3])
        return f"{names} has not connected to this worker at {info.commands}; {_WAY_OUT}"
    return (
        f"no conductor has connected to this worker at {info.commands}, and none is registered: "
        "start one with the same --metadata and --cluster; if one runs that does not register, "
        + _WAY_OUT
    )


def _read(value: bytes) -> ConductorRecord | None:
    if len(value) > _MAX_RECORD_BYTES:
        return None
    try:
        return _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
