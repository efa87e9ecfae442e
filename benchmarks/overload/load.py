"""Find what a cluster can serve, drive it at more, and watch it recover."""

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.model import VOCABULARY
from benchmarks.overload.memory import MemorySamples
from halfmoon_cli.bench.bench_record import BenchRecord, Slo
from halfmoon_cli.bench.load_generator import LoadGenerator, RunProgress
from halfmoon_cli.bench.load_plan import PlannedRequest, PromptPart, RequestChain
from halfmoon_cli.bench.prompt_writer import PromptWriter, RequestFormat, request_body
from halfmoon_cli.bench.request_sender import RequestSender
from halfmoon_cli.endpoint.endpoint_address import parse_endpoint

#: Lengths of prompts and answers, each as likely; no prompt shares a prefix with another.
PROMPT_TOKENS = (128, 256, 512, 1024)
ANSWER_TOKENS = (8, 16, 32, 64)
#: Limits as multiples of the times of a request that is alone, at P90; as in the papers.
TTFT_MULTIPLE, TBT_MULTIPLE = 10.0, 5.0
#: Requests under way at once while the most that can be served is measured.
SATURATED_BY = 16
#: Recovered: so many requests in a row, one after the other, with the first token within so many
#: times that of a request that is alone.
PROBES, PROBE_WITHIN = 3, 2.0
_REQUEST_LIMIT_S = 120.0
#: Seconds between two reports of a run.
_REPORT_S = 10.0


@dataclass(frozen=True)
class Calibration:
    """What a cluster without limits can do."""

    #: TTFT and TBT of requests that are alone, at P90, seconds.
    alone: Slo
    #: Most requests finished per second.
    served_per_s: float

    @property
    def slo(self) -> Slo:
        """The limits of a good request."""
        assert self.alone.ttft_s is not None and self.alone.tbt_s is not None
        return Slo(self.alone.ttft_s * TTFT_MULTIPLE, self.alone.tbt_s * TBT_MULTIPLE)


@dataclass
class OverloadRun:
    """One run of a load."""

    records: list[BenchRecord]
    #: When it began by the clock of the records, and how long requests arrived, seconds.
    began_s: float
    seconds: float
    memory: MemorySamples
    #: Seconds from the last arrival until the cluster was back to normal; None: never.
    recovered_s: float | None = None

    def admitted(self) -> list[BenchRecord]:
        """Requests that were not refused."""
        return [record for record in self.records if record.outcome != "refused"]

    def refused(self) -> list[BenchRecord]:
        """Requests that were refused."""
        return [record for record in self.records if record.outcome == "refused"]

    def n_good(self, slo: Slo) -> int:
        """Count the requests that finished within both limits."""
        return sum(not slo.missed(record) for record in self.records)

    def share_good(self, slo: Slo, until_s: float = math.inf) -> float:
        """Return the share of the admitted that finished within both limits.

        Args:
            slo: the limits.
            until_s: only those that arrived in so many first seconds count.
        """
        return _share_good([r for r in self.records if r.scheduled_s - self.began_s < until_s], slo)


@dataclass(frozen=True)
class RunReport:
    """The state of a run, shown while it lasts."""

    at_s: float
    seconds: float
    n_sent: int
    #: Requests that have ended since the last report: to look at all each time would delay some.
    ended: Sequence[BenchRecord]

    def describe(self, slo: Slo) -> str:
        """Return it in a line."""
        n_refused = sum(record.outcome == "refused" for record in self.ended)
        return (
            f"{self.at_s:.0f} of {self.seconds:.0f} s, {self.n_sent:,} sent; since the last line"
            f" {n_refused / max(1, len(self.ended)):.0%} refused,"
            f" {_share_good(self.ended, slo):.1%} of the admitted within limits"
        )


def _share_good(records: Sequence[BenchRecord], slo: Slo) -> float:
    admitted = [record for record in records if record.outcome != "refused"]
    return sum(not slo.missed(record) for record in admitted) / max(1, len(admitted))


class LoadDriver:
    """Sends requests to one endpoint and records them. An async context manager."""

    def __init__(self, url: str, seed: int) -> None:
        """Connect nothing yet."""
        self._dice = random.Random(f"overload {seed}")
        self._form = RequestFormat(model="bench")
        self._writer = PromptWriter(VOCABULARY, f"overload {seed}")
        self._n_sent = 0
        self._clock: Callable[[], float] = lambda: 0.0
        self._sender = RequestSender(
            parse_endpoint(url), lambda: self._clock(), limit_s=_REQUEST_LIMIT_S
        )

    async def __aenter__(self) -> "LoadDriver":
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self._clock = lambda: loop.time() - began_s
        await self._sender.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._sender.__aexit__(*exc_info)

    # -- one request after the other, or so many at once -------------------------------------

    async def one(self, n_input: int | None = None, n_output: int | None = None) -> BenchRecord:
        """Send one request and wait for its end."""
        planned = self._planned(self._clock(), n_input, n_output)
        record = BenchRecord(planned.index, planned.at_s, planned.n_input, planned.n_output)
        await self._sender.send(self._body(planned), record)
        return record

    async def alone(self, n: int) -> Slo:
        """Return TTFT and TBT at P90 of `n` requests, one after the other."""
        records = [await self.one() for _ in range(n)]
        return Slo(
            _p90([r.ttft_s for r in records if r.ttft_s is not None]),
            _p90([r.tbt_s for r in records if r.tbt_s is not None]),
        )

    async def saturated(self, seconds: float) -> float:
        """Return the requests finished per second with `SATURATED_BY` under way at once."""
        began_s = self._clock()
        finished = 0

        async def keep_busy() -> None:
            nonlocal finished
            while self._clock() < began_s + seconds:
                record = await self.one()
                finished += record.outcome == "finished"

        async with asyncio.TaskGroup() as tasks:
            for _ in range(SATURATED_BY):
                tasks.create_task(keep_busy())
        return finished / (self._clock() - began_s)

    # -- at a rate ---------------------------------------------------------------------------

    async def overload(
        self,
        rate_per_s: float,
        seconds: float,
        pids: Mapping[str, int],
        alone: Slo,
        *,
        report: Callable[[RunReport], None] = lambda _: None,
    ) -> OverloadRun:
        """Send Poisson arrivals at a rate, and then probes until the cluster is back to normal.

        Args:
            rate_per_s: arrivals per second.
            seconds: for so long.
            pids: processes whose memory is sampled, by name.
            alone: TTFT and TBT of requests that are alone.
            report: called every ten seconds, and at the end of arrivals.
        """
        memory = MemorySamples(pids)
        began_s = self._clock()
        chains = self._arrivals(rate_per_s, seconds)
        progress = RunProgress(len(chains))

        async def send(planned: PlannedRequest, record: BenchRecord) -> None:
            await self._sender.send(self._body(planned), record)
            # Times count from the plan's start, as `BenchRecord` has them from the clock's.
            record.scheduled_s += began_s

        generator = LoadGenerator(
            chains, send, lambda: self._clock() - began_s, progress, most_in_flight=1 << 16
        )
        sampling = asyncio.create_task(memory.sample_forever())
        try:
            loading = asyncio.create_task(generator.run())
            n_reported = 0
            while (left_s := began_s + seconds - self._clock()) > 0:
                await asyncio.sleep(min(_REPORT_S, left_s))
                ended = progress.records[n_reported:]
                n_reported += len(ended)
                report(RunReport(self._clock() - began_s, seconds, progress.n_sent, ended))
            recovered_s = await self._recover(alone)
            await loading
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
        return OverloadRun(progress.records, began_s, seconds, memory, recovered_s)

    async def _recover(self, alone: Slo) -> float | None:
        """Send probes one after the other until enough in a row are as fast as alone."""
        assert alone.ttft_s is not None
        ended_s = self._clock()
        first_s, in_a_row = 0.0, 0
        while self._clock() < ended_s + _REQUEST_LIMIT_S:
            at_s = self._clock()
            record = await self.one(min(PROMPT_TOKENS), min(ANSWER_TOKENS))
            if record.ttft_s is not None and record.ttft_s <= PROBE_WITHIN * alone.ttft_s:
                first_s = first_s if in_a_row else at_s
                in_a_row += 1
            else:
                in_a_row = 0
                await asyncio.sleep(0.02)
            if in_a_row == PROBES:
                return first_s - ended_s
        return None

    def _arrivals(self, rate_per_s: float, seconds: float) -> list[RequestChain]:
        chains: list[RequestChain] = []
        at_s = self._dice.expovariate(rate_per_s)
        while at_s < seconds:
            chains.append((self._planned(at_s),))
            at_s += self._dice.expovariate(rate_per_s)
        return chains

    def _body(self, planned: PlannedRequest) -> bytes:
        # The model's tokens mostly have no text: with their ids each is an event all the same.
        body = request_body(self._form, self._writer, planned)
        return body.removesuffix(b"}") + b',"return_token_ids":true}'

    def _planned(
        self, at_s: float, n_input: int | None = None, n_output: int | None = None
    ) -> PlannedRequest:
        self._n_sent += 1
        part = PromptPart(f"own {self._n_sent}", n_input or self._dice.choice(PROMPT_TOKENS))
        return PlannedRequest(
            index=self._n_sent,
            at_s=at_s,
            parts=(part,),
            n_output=n_output or self._dice.choice(ANSWER_TOKENS),
        )


def _p90(values: list[float]) -> float:
    return statistics.quantiles(values, n=10)[-1]
