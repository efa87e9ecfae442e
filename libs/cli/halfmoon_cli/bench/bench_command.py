"""Define `halfmoon bench`: its flags, one run, and the output."""

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from halfmoon_cli.bench.bench_record import TbtDefinition
from halfmoon_cli.endpoint.endpoint_address import DEFAULT_URL, parse_endpoint
from halfmoon_cli.endpoint.endpoint_errors import EndpointError
from halfmoon_cli.endpoint.endpoint_options import Key, Model, TlsCa, Url

if TYPE_CHECKING:
    from halfmoon_cli.bench.bench_settings import BenchWorkload
    from halfmoon_cli.bench.endpoint_probe import BenchTarget

console = Console(highlight=False)


def _load(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel="What is sent", **more)


def _made_up(text: str, least: int) -> Any:
    return typer.Option(help=text, min=least, rich_help_panel="A made-up load")


def _trace(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel="A trace", **more)


def _request(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel="How it is put", **more)


def _judged(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="How it is judged and kept")


def bench_command(
    url: Url = DEFAULT_URL,
    model: Model = "",
    api_key: Key = "",
    tls_ca: TlsCa = "",
    trace: Annotated[
        str, _load("Replay this trace in Mooncake's JSONL, or a workload of `halfmoon simulate`")
    ] = "",
    rate: Annotated[float | None, _load("Requests per second, as a Poisson process")] = None,
    requests: Annotated[
        int | None, _load("So many; without it: 100, or all of a trace", min=1)
    ] = None,
    duration: Annotated[float | None, _load("Seconds in which requests are begun")] = None,
    input_tokens: Annotated[int, _made_up("Of a prompt, after its shared prefix", 1)] = 512,
    output_tokens: Annotated[int, _made_up("Of an answer", 1)] = 64,
    shared_prefix: Annotated[int, _made_up("Tokens that prompts have in common", 0)] = 0,
    prefixes: Annotated[int, _made_up("How many such prefixes there are", 1)] = 1,
    speedup: Annotated[float, _trace("Arrivals, and turns, so many times as fast")] = 1.0,
    spread: Annotated[bool, _trace("Spread requests of one time stamp up to the next")] = False,
    block_tokens: Annotated[int, _trace("Tokens that one hash id stands for", min=1)] = 512,
    scale_lengths: Annotated[
        float, _trace("Prompts, blocks and answers so many times as long")
    ] = 1.0,
    max_input: Annotated[int | None, _trace("Cut prompts after so many tokens", min=1)] = None,
    max_output: Annotated[int | None, _trace("End answers after so many tokens", min=1)] = None,
    traces: Annotated[str, _trace("Folder with published traces", envvar="HALFMOON_TRACES")] = "",
    vocab: Annotated[
        int | None, _request("Token ids are below this; without it: /tokenize is asked", min=2)
    ] = None,
    ignore_eos: Annotated[
        bool, _request("Answers as long as asked for; some endpoints refuse the field")
    ] = True,
    max_in_flight: Annotated[int, _request("Further requests wait, and are late", min=1)] = 1024,
    timeout: Annotated[float, _request("Seconds of a whole request")] = 600.0,
    seed: Annotated[int, _request("Of arrivals and prefixes")] = 0,
    salt: Annotated[
        str, _request("Of the prompts' tokens; without it: a new one, so that nothing is cached")
    ] = "",
    ttft_slo: Annotated[float | None, _judged("Seconds that a good request has at most")] = None,
    tbt_slo: Annotated[float | None, _judged("Seconds, held against --tbt-by")] = None,
    tbt_by: Annotated[
        TbtDefinition,
        _judged("A request's mean, the mean of its longest 10 % of gaps, or its longest gap"),
    ] = "mean",
    json: Annotated[Path | None, _judged("Write settings and figures here")] = None,
) -> None:
    """Load an OpenAI endpoint by the clock, by a trace or a made-up load; report its goodput.

    Requests are sent when they are due, however slow the endpoint is, and their times count from
    then: no coordinated omission. Refused and failed ones are not good. It ends with 1 when
    nothing was answered.
    """
    import asyncio

    from halfmoon_cli.bench.bench_report import print_result, write_json
    from halfmoon_cli.bench.bench_run import run_workload
    from halfmoon_cli.bench.bench_settings import BadBenchSettings, BenchSettings, plan_workload
    from halfmoon_cli.bench.endpoint_probe import probe_target
    from halfmoon_simulator.workloads.traces import BadTrace
    from halfmoon_simulator.workloads.workload_sources import find_traces

    try:
        settings = BenchSettings(
            trace=trace,
            traces=traces or find_traces(),
            speedup=speedup,
            spread=spread,
            rate_per_s=rate,
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
            vocab=vocab,
            ignore_eos=ignore_eos,
            ttft_slo_s=ttft_slo,
            tbt_slo_s=tbt_slo,
            tbt_by=tbt_by,
            max_in_flight=max_in_flight,
            timeout_s=timeout,
            seed=seed,
            salt=salt or secrets.token_hex(4),
        )
        if json is not None and not json.resolve().parent.is_dir():
            raise FileNotFoundError(f"{json}: there is no folder {json.resolve().parent}")
        workload = plan_workload(settings)
        target = probe_target(parse_endpoint(url, api_key, tls_ca), model, vocab)
        _print_head(target, workload)
        result = asyncio.run(run_workload(target, settings, workload, console))
        print_result(result, console)
        if json is not None:
            write_json(json, result)
            console.print(f"wrote {json}")
    except (BadBenchSettings, BadTrace, OSError, ValueError) as error:
        _give_up(str(error), 2)
    except EndpointError as error:
        _give_up(str(error), 1)
    if not result.summary.n_finished:
        raise typer.Exit(1)


def _print_head(target: "BenchTarget", workload: "BenchWorkload") -> None:
    from halfmoon_cli.bench.load_plan import plan_stats

    stats = plan_stats(workload.chains)
    text = (
        f"{target.model} at {target.endpoint.api}: {workload.description}.\n"
        f"{stats.n_requests:,} requests in {stats.duration_s:,.0f} s, on average"
        f" {stats.mean_input_tokens:,.0f} tokens in and {stats.mean_output_tokens:,.0f} out,"
        f" {stats.shared:.1%} of the prompts seen before"
    )
    console.print(Text(text), soft_wrap=True)


def _give_up(message: str, status: int) -> NoReturn:
    Console(stderr=True).print(Text.assemble(("halfmoon: ", "red"), message), soft_wrap=True)
    raise typer.Exit(status)
