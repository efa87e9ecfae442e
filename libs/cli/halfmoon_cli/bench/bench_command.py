"""`halfmoon bench`: its flags, one run or a search of several, and where the numbers go."""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from halfmoon_cli.bench.bench_run import BenchResult, BenchTarget, probe_target, run_workload
from halfmoon_cli.bench.bench_settings import (
    BadBenchSettings,
    BenchSettings,
    BenchWorkload,
    PromptKind,
    plan_workload,
)
from halfmoon_cli.bench.load.bench_record import TbtDefinition
from halfmoon_cli.bench.load.length_distributions import BadLengthDistribution
from halfmoon_cli.bench.load.load_generator import RunProgress
from halfmoon_cli.bench.load.load_plan import plan_stats
from halfmoon_cli.bench.load.prompt_writer import ApiKind
from halfmoon_cli.bench.rate_search import RateSearch
from halfmoon_cli.bench.report.bench_screen import print_result, show_progress
from halfmoon_cli.bench.report.result_files import write_csv, write_json
from halfmoon_cli.endpoint.endpoint_address import DEFAULT_URL, ApiEndpoint, parse_endpoint
from halfmoon_cli.endpoint.endpoint_errors import EndpointError
from halfmoon_cli.endpoint.endpoint_options import Key, Model, Url
from halfmoon_simulator.workloads.traces import BadTrace
from halfmoon_simulator.workloads.workload_sources import find_traces

console = Console(highlight=False)

_LOAD = "What is sent"
_MADE_UP = "A made-up load"
_TRACE = "A trace"
_SHAPE = "How it is put"
_JUDGED = "How it is judged and kept"


def bench_command(
    url: Url = DEFAULT_URL,
    model: Model = "",
    api_key: Key = "",
    trace: Annotated[
        str,
        typer.Option(
            help="Replay this trace in Mooncake's JSONL; or a workload of `halfmoon simulate` by"
            " its name",
            rich_help_panel=_LOAD,
        ),
    ] = "",
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second, as a Poisson process", rich_help_panel=_LOAD),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Instead of a clock: so many at all times", rich_help_panel=_LOAD),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, help="So many; without it: 100, or all of a trace", rich_help_panel=_LOAD
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(help="Seconds in which requests are begun", rich_help_panel=_LOAD),
    ] = None,
    input_tokens: Annotated[
        str,
        typer.Option(
            help="Of a prompt, after its shared prefix: 512, 200-800, exponential:MEAN or"
            " lognormal:MEAN,SPREAD",
            rich_help_panel=_MADE_UP,
        ),
    ] = "512",
    output_tokens: Annotated[
        str, typer.Option(help="Of an answer, in the same forms", rich_help_panel=_MADE_UP)
    ] = "64",
    shared_prefix: Annotated[
        int,
        typer.Option(min=0, help="Tokens that prompts have in common", rich_help_panel=_MADE_UP),
    ] = 0,
    prefixes: Annotated[
        int,
        typer.Option(min=1, help="How many such prefixes there are", rich_help_panel=_MADE_UP),
    ] = 1,
    speedup: Annotated[
        float,
        typer.Option(help="Arrivals, and turns, so many times as fast", rich_help_panel=_TRACE),
    ] = 1.0,
    spread: Annotated[
        bool,
        typer.Option(
            help="Spread requests of one time stamp up to the next", rich_help_panel=_TRACE
        ),
    ] = False,
    block_tokens: Annotated[
        int,
        typer.Option(min=1, help="Tokens that one hash id stands for", rich_help_panel=_TRACE),
    ] = 512,
    scale_lengths: Annotated[
        float,
        typer.Option(
            help="Prompts, blocks and answers so many times as long", rich_help_panel=_TRACE
        ),
    ] = 1.0,
    max_input: Annotated[
        int | None,
        typer.Option(min=1, help="Cut prompts after so many tokens", rich_help_panel=_TRACE),
    ] = None,
    max_output: Annotated[
        int | None,
        typer.Option(min=1, help="End answers after so many tokens", rich_help_panel=_TRACE),
    ] = None,
    traces: Annotated[
        str,
        typer.Option(
            envvar="HALFMOON_TRACES",
            help="Folder with published traces",
            rich_help_panel=_TRACE,
        ),
    ] = "",
    api: Annotated[
        ApiKind, typer.Option(help="Which of the endpoint's routes", rich_help_panel=_SHAPE)
    ] = "completions",
    prompt: Annotated[
        PromptKind,
        typer.Option(
            help="auto: token ids if --vocab or /tokenize says which there are, else words",
            rich_help_panel=_SHAPE,
        ),
    ] = "auto",
    vocab: Annotated[
        int | None,
        typer.Option(min=2, help="Token ids are below this", rich_help_panel=_SHAPE),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Answers as long as asked for; some endpoints refuse the field",
            rich_help_panel=_SHAPE,
        ),
    ] = True,
    temperature: Annotated[float, typer.Option(min=0, rich_help_panel=_SHAPE)] = 0.0,
    warmup: Annotated[
        int,
        typer.Option(
            min=0, help="Short requests before it begins, not counted", rich_help_panel=_SHAPE
        ),
    ] = 1,
    max_in_flight: Annotated[
        int,
        typer.Option(min=1, help="Further requests wait, and are late", rich_help_panel=_SHAPE),
    ] = 1024,
    timeout: Annotated[
        float, typer.Option(help="Seconds of a whole request", rich_help_panel=_SHAPE)
    ] = 600.0,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths", rich_help_panel=_SHAPE)] = 0,
    salt: Annotated[
        str,
        typer.Option(
            help="Of the prompts' tokens; without it: drawn anew, so that an earlier run has"
            " left nothing in the cache",
            rich_help_panel=_SHAPE,
        ),
    ] = "",
    ttft_slo: Annotated[
        float | None,
        typer.Option(help="Seconds that a good request has at most", rich_help_panel=_JUDGED),
    ] = None,
    tbt_slo: Annotated[
        float | None,
        typer.Option(help="Seconds, held against --tbt-by", rich_help_panel=_JUDGED),
    ] = None,
    tbt_by: Annotated[
        TbtDefinition,
        typer.Option(
            help="A request's mean, the mean of its longest 10 % of gaps, or its longest gap",
            rich_help_panel=_JUDGED,
        ),
    ] = "mean",
    find_goodput: Annotated[
        bool,
        typer.Option(
            help="Raise the rate until fewer than 90 % are good; --rate or --speedup is the first",
            rich_help_panel=_JUDGED,
        ),
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write settings and figures here", rich_help_panel=_JUDGED)
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write a line per request here", rich_help_panel=_JUDGED)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw TTFT and TBT here: .svg, .png or .pdf", rich_help_panel=_JUDGED),
    ] = None,
) -> None:
    """Load any OpenAI endpoint, by a trace or a made-up load, and report its goodput.

    Requests are sent when they are due, however slow the endpoint is, and their times count from
    then: no coordinated omission. Refused and failed ones are not good. It ends with 1 when
    nothing was answered.
    """
    try:
        settings = BenchSettings(
            trace=trace,
            traces=traces or find_traces(),
            speedup=speedup,
            spread=spread,
            rate_per_s=rate,
            concurrency=concurrency,
            n_requests=requests,
            duration_s=duration,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            shared_prefix_tokens=shared_prefix,
            n_prefixes=prefixes,
            block_tokens=block_tokens,
            scale_lengths=scale_lengths,
            max_input_tokens=max_input,
            max_output_tokens=max_output,
            api=api,
            prompt=prompt,
            vocab=vocab,
            ignore_eos=ignore_eos,
            temperature=temperature,
            ttft_slo_s=ttft_slo,
            tbt_slo_s=tbt_slo,
            tbt_by=tbt_by,
            n_warmup=warmup,
            max_in_flight=max_in_flight,
            timeout_s=timeout,
            seed=seed,
            salt=salt or secrets.token_hex(4),
        )
        _check(settings, find_goodput=find_goodput, plot=plot, files=(json, csv, plot))
        endpoint = parse_endpoint(url, api_key)
        first = plan_workload(settings)
        held: float | None = None
        if find_goodput:
            results, held = asyncio.run(_search(endpoint, model, settings))
        else:
            results = [asyncio.run(_once(endpoint, model, settings, first))]
        _keep(results, held, json, csv, plot)
    except (BadBenchSettings, BadLengthDistribution, BadTrace, OSError, ValueError) as error:
        _give_up(str(error), 2)
    except EndpointError as error:
        _give_up(str(error), 1)
    if not any(result.summary.n_finished for result in results):
        raise typer.Exit(1)


async def _once(
    endpoint: ApiEndpoint, model: str, settings: BenchSettings, workload: BenchWorkload
) -> BenchResult:
    target = await probe_target(endpoint, model, settings)
    _head(target, workload)
    result = await run_workload(target, settings, workload, _show)
    print_result(result, console)
    return result


async def _search(
    endpoint: ApiEndpoint, model: str, settings: BenchSettings
) -> tuple[list[BenchResult], float | None]:
    """Runs at one rate after another; all of them, and the highest rate that held."""
    target = await probe_target(endpoint, model, settings)
    _head(target, plan_workload(settings))
    search = RateSearch(first=1.0)
    results: list[BenchResult] = []
    rates: dict[float, float] = {}
    while (factor := search.rate()) is not None:
        # Of an earlier trial nothing may be cached, and each must be told apart.
        trial = msgspec.structs.replace(
            settings.times(factor), salt=f"{settings.salt}.{search.n_trials}"
        )
        result = await run_workload(target, trial, plan_workload(trial), _show)
        results.append(result)
        summary = result.summary
        rates[factor] = summary.offered_per_s
        console.print(
            f"{summary.offered_per_s:,.2f} requests/s offered: {summary.good_share:.1%} good,"
            f" TTFT p90 {summary.ttft_s.p90:.3g} s, TBT p90 {summary.tbt_s.p90:.3g} s"
        )
        if summary.cut_short or summary.n_failed == summary.n_requests:
            break
        search.tried(factor, summary.good_share)
    held = None if search.holds is None else rates[search.holds]
    if held is None:
        console.print("at no rate that was tried were 90 % of the requests good")
    else:
        console.print(f"highest rate with 90 % good: [bold]{held:,.2f}[/bold] requests/s")
    return results, held


def _head(target: BenchTarget, workload: BenchWorkload) -> None:
    found = plan_stats(workload.chains)
    written_in = "words" if target.alphabet.tokens is None else "token ids"
    console.print(
        Text(
            f"{target.model} at {target.endpoint.api}: {workload.description}.\n"
            f"{found.n_requests:,} requests in {found.duration_s:,.0f} s, on average"
            f" {found.mean_input_tokens:,.0f} tokens in (as {written_in}) and"
            f" {found.mean_output_tokens:,.0f} out, {found.shared:.1%} of the prompts seen before"
        ),
        soft_wrap=True,
    )


def _show(tally: RunProgress, clock: Callable[[], float]) -> AbstractAsyncContextManager[None]:
    return show_progress(console, tally, clock)


def _keep(
    results: list[BenchResult],
    held: float | None,
    json: Path | None,
    csv: Path | None,
    plot: Path | None,
) -> None:
    """Write the files that were asked for; of a search the last run's requests."""
    if json is not None:
        write_json(json, results, held)
    if csv is not None:
        write_csv(csv, results[-1].records, results[-1].settings.slo)
    if plot is not None:
        from halfmoon_cli.bench.report.result_plots import (  # matplotlib takes a second to import
            save_plot,
        )

        save_plot(plot, results[-1])
    for path in (json, csv, plot):
        if path is not None:
            console.print(f"wrote {path}")


def _check(
    settings: BenchSettings,
    *,
    find_goodput: bool,
    plot: Path | None,
    files: tuple[Path | None, ...],
) -> None:
    """What can be known to fail before the work is done whose results it is for."""
    if find_goodput and not settings.can_go_faster:
        raise BadBenchSettings(
            "--find-goodput raises a rate: give --rate or --trace, no --concurrency"
        )
    if find_goodput and settings.ttft_slo_s is None and settings.tbt_slo_s is None:
        raise BadBenchSettings("--find-goodput needs to know what is good: --ttft-slo, --tbt-slo")
    if plot is not None and plot.suffix not in (".svg", ".png", ".pdf"):
        raise BadBenchSettings(f"--plot {plot}: its name must end in .svg, .png or .pdf")
    for path in files:
        if path is not None and not path.resolve().parent.is_dir():
            raise FileNotFoundError(f"{path}: there is no folder {path.resolve().parent}")


def _give_up(message: str, status: int) -> NoReturn:
    Console(stderr=True).print(Text.assemble(("halfmoon: ", "red"), message), soft_wrap=True)
    raise typer.Exit(status)
