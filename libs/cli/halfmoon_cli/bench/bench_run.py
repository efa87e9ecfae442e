"""A whole run: plan, probe, warm up, send, sum up."""

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime

import msgspec

from halfmoon_cli.bench.bench_settings import BenchSettings, BenchWorkload
from halfmoon_cli.bench.endpoint_probe import find_model, find_vocabulary, warm_up
from halfmoon_cli.bench.load.bench_record import BenchRecord
from halfmoon_cli.bench.load.http_client import BenchHttpClient
from halfmoon_cli.bench.load.load_generator import LoadGenerator, RunProgress
from halfmoon_cli.bench.load.load_plan import PlannedRequest, PlanStats, plan_stats
from halfmoon_cli.bench.load.prompt_writer import (
    PromptVocabulary,
    PromptWriter,
    RequestFormat,
    request_body,
)
from halfmoon_cli.bench.load.request_sender import RequestSender
from halfmoon_cli.bench.report.run_summary import BenchSummary, summarize_run
from halfmoon_cli.endpoint.endpoint_address import ApiEndpoint


class BenchTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out about an endpoint."""

    endpoint: ApiEndpoint
    model: str
    alphabet: PromptVocabulary


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    url: str
    model: str
    #: "token ids" or "words".
    written_in: str
    description: str
    #: ISO 8601, UTC.
    began_at: str
    settings: BenchSettings
    facts: PlanStats
    summary: BenchSummary
    records: list[BenchRecord]


#: Shows a run while it goes on.
ShowProgress = Callable[[RunProgress, Callable[[], float]], AbstractAsyncContextManager[None]]


async def probe_target(endpoint: ApiEndpoint, model: str, settings: BenchSettings) -> BenchTarget:
    """Ask the endpoint what there is to know.

    Raises:
        EndpointError: it does not answer, or not as an OpenAI endpoint.
    """
    async with BenchHttpClient(endpoint) as wire:
        name = model or await find_model(wire, endpoint)
        alphabet = await find_vocabulary(wire, endpoint, name, settings)
    return BenchTarget(endpoint=endpoint, model=name, alphabet=alphabet)


async def run_workload(
    target: BenchTarget, settings: BenchSettings, workload: BenchWorkload, show: ShowProgress
) -> BenchResult:
    """Send a workload, and sum up what came of it.

    Ctrl-C ends it early: what is under way then is dropped and not counted.

    Raises:
        EndpointError: not even a first request could be answered.
    """
    form = RequestFormat(
        model=target.model,
        api=settings.api,
        ignore_eos=settings.ignore_eos,
        temperature=settings.temperature,
    )
    writer = PromptWriter(target.alphabet, settings.salt)
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    def clock() -> float:
        return loop.time() - began_s

    async with BenchHttpClient(target.endpoint) as wire:
        asker = RequestSender(
            wire, target.endpoint.api + form.path, clock, limit_s=settings.timeout_s
        )
        first = workload.chains[0][0]
        await warm_up(asker, form, writer, first, settings.n_warmup, clock)
        tally = RunProgress(sum(map(len, workload.chains)))

        async def ask(planned: PlannedRequest, record: BenchRecord) -> None:
            await asker.ask(request_body(form, writer, planned), record)

        run = LoadGenerator(
            workload.chains,
            ask,
            clock,
            tally,
            users=settings.concurrency,
            most_in_flight=settings.max_in_flight,
            until_s=settings.duration_s,
        )
        began_at = datetime.now(UTC).isoformat(timespec="seconds")
        # The plan's objects are many and stay: the collector need not look at them again.
        gc.collect()
        gc.freeze()
        began_s = loop.time() - first.at_s
        try:
            async with _stopped_by_ctrl_c(tally), show(tally, clock):
                cut_short = await run.run()
        finally:
            gc.unfreeze()
    return BenchResult(
        url=target.endpoint.api,
        model=target.model,
        written_in="words" if target.alphabet.tokens is None else "token ids",
        description=workload.description,
        began_at=began_at,
        settings=settings,
        facts=plan_stats(workload.chains),
        summary=summarize_run(
            tally.records,
            settings.slo,
            loop_lags_s=tally.loop_lags_s,
            n_held=tally.n_held,
            most_in_flight=tally.most_in_flight,
            cut_short=cut_short,
        ),
        records=sorted(tally.records, key=lambda record: record.index),
    )


@asynccontextmanager
async def _stopped_by_ctrl_c(tally: RunProgress) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, tally.stop.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
