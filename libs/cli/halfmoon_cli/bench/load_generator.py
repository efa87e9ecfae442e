"""Send a plan's requests when they are due, however slow the endpoint is.

An open loop: a request counts from the moment that the plan gives it. The times of one that is
sent late, for whatever reason, include that delay (no coordinated omission).
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from halfmoon_cli.bench.bench_record import BenchRecord
from halfmoon_cli.bench.load_plan import PlannedRequest, RequestChain
from halfmoon_runtime.task_errors import raising_task_errors

#: Seconds between samples of the event loop's lateness, and the most samples kept.
_LAG_EVERY_S = 0.02
_MOST_LAGS = 1 << 20


@dataclass
class RunProgress:
    """Records and counts of a run so far."""

    n_planned: int
    #: Records of requests that have ended.
    records: list[BenchRecord] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    n_sent: int = 0
    n_in_flight: int = 0
    most_in_flight: int = 0
    n_held: int = 0
    loop_lags_s: list[float] = field(default_factory=list)
    #: Set to end the run early.
    stop: asyncio.Event = field(default_factory=asyncio.Event)


#: Sends a request and writes its course into the record.
SendRequest = Callable[[PlannedRequest, BenchRecord], Awaitable[None]]


class LoadGenerator:
    """One run of a plan.

    Args:
        chains: sessions to send, in order of time.
        send: sends one request.
        clock: seconds since the start of the run.
        progress: kept up to date.
        most_in_flight: bound on requests under way; further ones wait, and are late.
    """

    def __init__(
        self,
        chains: Sequence[RequestChain],
        send: SendRequest,
        clock: Callable[[], float],
        progress: RunProgress,
        *,
        most_in_flight: int = 1024,
    ) -> None:
        self._chains = chains
        self._send = send
        self._clock = clock
        self._progress = progress
        self._room = asyncio.Semaphore(most_in_flight)

    async def run(self) -> bool:
        """Send all requests and wait for their ends; return whether it was stopped early."""
        sending = asyncio.create_task(self._send_all())
        stopping = asyncio.create_task(self._progress.stop.wait())
        sampling = asyncio.create_task(self._sample_lags())
        try:
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopped = not sending.done()
            if not stopped:
                sending.result()
            return stopped
        finally:
            for task in (sending, stopping, sampling):
                task.cancel()
            await asyncio.gather(sending, stopping, sampling, return_exceptions=True)

    async def _send_all(self) -> None:
        with raising_task_errors():
            async with asyncio.TaskGroup() as tasks:
                for chain in self._chains:
                    await self._sleep_until(chain[0].at_s)
                    tasks.create_task(self._send_chain(chain))

    async def _send_chain(self, chain: RequestChain) -> None:
        """Send the turns of a session whose first turn is due."""
        at_s = chain[0].at_s
        for number, planned in enumerate(chain):
            if number:
                at_s = self._clock() + planned.at_s
                await self._sleep_until(at_s)
            await self._send_one(planned, at_s)

    async def _send_one(self, planned: PlannedRequest, at_s: float) -> None:
        """Send a request once there is room; its times count from `at_s` all the same."""
        progress = self._progress
        if self._room.locked():
            progress.n_held += 1
        async with self._room:
            record = BenchRecord(planned.index, at_s, planned.n_input, planned.n_output)
            progress.n_sent += 1
            progress.n_in_flight += 1
            progress.most_in_flight = max(progress.most_in_flight, progress.n_in_flight)
            try:
                await self._send(planned, record)
            finally:
                progress.n_in_flight -= 1
            progress.records.append(record)
            progress.outcomes[record.outcome] += 1

    async def _sleep_until(self, at_s: float) -> None:
        # At least once round the loop, so that a burst does not keep answers from being read.
        await asyncio.sleep(max(0.0, at_s - self._clock()))

    async def _sample_lags(self) -> None:
        while len(self._progress.loop_lags_s) < _MOST_LAGS:
            before_s = self._clock()
            await asyncio.sleep(_LAG_EVERY_S)
            late_s = self._clock() - before_s - _LAG_EVERY_S
            self._progress.loop_lags_s.append(max(0.0, late_s))
