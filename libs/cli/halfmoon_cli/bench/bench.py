"""A whole run: plan, probe, warm up, send, sum up."""

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime

import msgspec

from halfmoon_cli.bench.asking import Asker
from halfmoon_cli.bench.plan import Facts, Planned, facts
from halfmoon_cli.bench.probe import find_alphabet, find_model, warm_up
from halfmoon_cli.bench.prompts import Alphabet, Form, PromptWriter, request_body
from halfmoon_cli.bench.record import Record
from halfmoon_cli.bench.running import Run, Tally
from halfmoon_cli.bench.settings import Settings, Workload
from halfmoon_cli.bench.summary import Summary, summarize
from halfmoon_cli.bench.wire import Wire
from halfmoon_cli.endpoint.address import Endpoint


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out about an endpoint."""

    endpoint: Endpoint
    model: str
    alphabet: Alphabet


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    url: str
    model: str
    #: "token ids" or "words".
    written_in: str
    description: str
    #: ISO 8601, UTC.
    began_at: str
    settings: Settings
    facts: Facts
    summary: Summary
    records: list[Record]


#: Shows a run while it goes on.
Show = Callable[[Tally, Callable[[], float]], AbstractAsyncContextManager[None]]


async def find_target(endpoint: Endpoint, model: str, settings: Settings) -> Target:
    """Ask the endpoint what there is to know.

    Raises:
        EndpointError: it does not answer, or not as an OpenAI endpoint.
    """
    async with Wire(endpoint) as wire:
        name = model or await find_model(wire, endpoint)
        alphabet = await find_alphabet(wire, endpoint, name, settings)
    return Target(endpoint=endpoint, model=name, alphabet=alphabet)


async def bench(target: Target, settings: Settings, workload: Workload, show: Show) -> Result:
    """Send a workload, and sum up what came of it.

    Ctrl-C ends it early: what is under way then is dropped and not counted.

    Raises:
        EndpointError: not even a first request could be answered.
    """
    form = Form(
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

    async with Wire(target.endpoint) as wire:
        asker = Asker(wire, target.endpoint.api + form.path, clock, limit_s=settings.timeout_s)
        first = workload.chains[0][0]
        await warm_up(asker, form, writer, first, settings.n_warmup, clock)
        tally = Tally(sum(map(len, workload.chains)))

        async def ask(planned: Planned, record: Record) -> None:
            await asker.ask(request_body(form, writer, planned), record)

        run = Run(
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
    return Result(
        url=target.endpoint.api,
        model=target.model,
        written_in="words" if target.alphabet.tokens is None else "token ids",
        description=workload.description,
        began_at=began_at,
        settings=settings,
        facts=facts(workload.chains),
        summary=summarize(
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
async def _stopped_by_ctrl_c(tally: Tally) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, tally.stop.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
