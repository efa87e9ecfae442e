"""Sends a plan's requests when they are due, and not when the endpoint is ready for them.

An open loop: a request counts from the moment the plan gives it, so one that is sent late, for
whatever reason, has that in its times (no coordinated omission). With a number of users instead
of a clock the loop is closed, and a request counts from when its user was free.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from halfmoon_cli.bench.load.bench_record import BenchRecord
from halfmoon_cli.bench.load.load_plan import PlannedRequest, RequestChain

#: How often the event loop's lateness is sampled, and how many samples are kept.
_LAG_EVERY_S = 0.02
_MOST_LAGS = 1 << 20


@dataclass
class RunProgress:
    """A run as far as it has come; what a display reads."""

    n_planned: int
    #: Of requests that are over.
    records: list[BenchRecord] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    n_sent: int = 0
    n_in_flight: int = 0
    most_in_flight: int = 0
    n_held: int = 0
    loop_lags_s: list[float] = field(default_factory=list)
    #: Set to end the run early.
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def n_out(self) -> int:
        """Tokens of answers that are over."""
        return sum(record.n_out for record in self.records)


#: Sends a request and writes what becomes of it into its record.
SendRequest = Callable[[PlannedRequest, BenchRecord], Awaitable[None]]


class LoadGenerator:
    """One run.

    Args:
        chains: what to send, in order of time.
        ask: sends one request.
        clock: seconds since the start of the run.
        tally: kept up to date.
        users: None: by the plan's clock; else so many at a time, each as soon as one is over.
        most_in_flight: requests that may be under way at once.
        until_s: of a closed loop: nothing new is begun after so many seconds.
    """

    def __init__(
        self,
        chains: Sequence[RequestChain],
        ask: SendRequest,
        clock: Callable[[], float],
        tally: RunProgress,
        *,
        users: int | None = None,
        most_in_flight: int = 1024,
        until_s: float | None = None,
    ) -> None:
        self._chains = chains
        self._ask = ask
        self._clock = clock
        self._tally = tally
        self._users = users
        self._room = asyncio.Semaphore(most_in_flight)
        self._until_s = until_s

    async def run(self) -> bool:
        """Until all is answered, or somebody wants it to stop; whether it was stopped."""
        sending = asyncio.create_task(self._closed() if self._users else self._open())
        stopping = asyncio.create_task(self._tally.stop.wait())
        lagging = asyncio.create_task(self._sample_lags())
        try:
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopped = not sending.done()
            if not stopped:
                sending.result()
            return stopped
        finally:
            for task in (sending, stopping, lagging):
                task.cancel()
            await asyncio.gather(sending, stopping, lagging, return_exceptions=True)

    async def _open(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for chain in self._chains:
                await self._sleep_until(chain[0].at_s)
                tasks.create_task(self._follow(chain))

    async def _follow(self, chain: RequestChain) -> None:
        """The turns of a session, the first of which is due."""
        at_s = chain[0].at_s
        for number, planned in enumerate(chain):
            if number:
                at_s = self._clock() + planned.at_s
                await self._sleep_until(at_s)
            await self._one(planned, at_s)

    async def _closed(self) -> None:
        requests = (planned for chain in self._chains for planned in chain)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._users or 1):
                tasks.create_task(self._user(requests))

    async def _user(self, requests: Iterator[PlannedRequest]) -> None:
        for planned in requests:
            at_s = self._clock()
            if self._until_s is not None and at_s >= self._until_s:
                return
            await self._one(planned, at_s)

    async def _one(self, planned: PlannedRequest, at_s: float) -> None:
        """Send a request as soon as there is room; its time is `at_s` all the same."""
        if self._room.locked():
            self._tally.n_held += 1
        async with self._room:
            await self._send(planned, at_s)

    async def _send(self, planned: PlannedRequest, at_s: float) -> None:
        record = BenchRecord(planned.index, at_s, planned.n_input, planned.n_output)
        tally = self._tally
        tally.n_sent += 1
        tally.n_in_flight += 1
        tally.most_in_flight = max(tally.most_in_flight, tally.n_in_flight)
        try:
            await self._ask(planned, record)
        finally:
            tally.n_in_flight -= 1
        tally.records.append(record)
        tally.outcomes[record.outcome] += 1

    async def _sleep_until(self, at_s: float) -> None:
        # At least once round the loop, so that a burst does not keep answers from being read.
        await asyncio.sleep(max(0.0, at_s - self._clock()))

    async def _sample_lags(self) -> None:
        while len(self._tally.loop_lags_s) < _MOST_LAGS:
            before_s = self._clock()
            await asyncio.sleep(_LAG_EVERY_S)
            late_s = self._clock() - before_s - _LAG_EVERY_S
            self._tally.loop_lags_s.append(max(0.0, late_s))
