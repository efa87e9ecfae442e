"""Run a workload once: connect, send a first request, send the load, summarise it."""

import asyncio
import gc
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from rich.console import Console

from halfmoon_cli.bench.bench_record import BenchRecord
from halfmoon_cli.bench.bench_report import BenchResult, show_progress
from halfmoon_cli.bench.bench_settings import BenchSettings, BenchWorkload
from halfmoon_cli.bench.endpoint_probe import BenchTarget, send_first_request
from halfmoon_cli.bench.load_generator import LoadGenerator, RunProgress
from halfmoon_cli.bench.load_plan import PlannedRequest, plan_stats
from halfmoon_cli.bench.prompt_writer import PromptWriter, RequestFormat, request_body
from halfmoon_cli.bench.request_sender import RequestSender
from halfmoon_cli.bench.run_summary import summarize_run


async def run_workload(
    target: BenchTarget, settings: BenchSettings, workload: BenchWorkload, console: Console
) -> BenchResult:
    """Send a workload and summarise its results.

    Ctrl-C ends it early: requests under way are dropped and not counted.

    Raises:
        EndpointError: not even a first request could be answered.
    """
    form = RequestFormat(model=target.model, ignore_eos=settings.ignore_eos)
    writer = PromptWriter(target.vocabulary, settings.salt)
    first = workload.chains[0][0]
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    def clock() -> float:
        return loop.time() - began_s

    async with RequestSender(target.endpoint, clock, limit_s=settings.timeout_s) as sender:
        await send_first_request(sender, form, writer, first)
        progress = RunProgress(sum(map(len, workload.chains)))

        async def send(planned: PlannedRequest, record: BenchRecord) -> None:
            await sender.send(request_body(form, writer, planned), record)

        generator = LoadGenerator(
            workload.chains, send, clock, progress, most_in_flight=settings.max_in_flight
        )
        began_at = datetime.now(UTC).isoformat(timespec="seconds")
        # The plan's objects are many and stay: the collector need not look at them again.
        gc.collect()
        gc.freeze()
        began_s = loop.time() - first.at_s
        try:
            async with _stopped_by_ctrl_c(progress), show_progress(console, progress, clock):
                cut_short = await generator.run()
        finally:
            gc.unfreeze()
    return BenchResult(
        url=target.endpoint.api,
        model=target.model,
        description=workload.description,
        began_at=began_at,
        settings=settings,
        facts=plan_stats(workload.chains),
        summary=summarize_run(progress, settings.slo, cut_short=cut_short),
    )


@asynccontextmanager
async def _stopped_by_ctrl_c(progress: RunProgress) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, progress.stop.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
