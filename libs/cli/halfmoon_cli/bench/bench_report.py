"""Show a run: one line on a terminal while it lasts, then a table, and JSON for programs."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from halfmoon_cli.bench.bench_settings import BenchSettings
from halfmoon_cli.bench.load_generator import RunProgress
from halfmoon_cli.bench.load_plan import PlanStats
from halfmoon_cli.bench.run_summary import BenchSummary
from halfmoon_metadata.whole_file import replace_file
from halfmoon_simulator.results.run_report import format_seconds
from halfmoon_simulator.results.run_results import DistributionSummary

#: Seconds between two drawings; each takes milliseconds of the event loop.
_EVERY_S = 0.5
#: Meaning of the numbers in a JSON file, by the ends of their names.
UNITS = {
    "_s": "seconds; of a request from when it was to be sent",
    "_per_s": "per second of the run's duration",
    "tokens": "tokens, as the endpoint counts them",
    "share": "0 to 1",
    "null": "no request has this number",
}


#: Said in place of latencies that no request has.
NO_SUCCESS = "no request succeeded: there are no latencies and no goodput; the reasons by number:"


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Settings and figures of one run."""

    url: str
    model: str
    description: str
    #: ISO 8601, UTC.
    began_at: str
    settings: BenchSettings
    facts: PlanStats
    summary: BenchSummary


def write_json(path: Path, result: BenchResult) -> None:
    """Write settings and figures of a run.

    Raises:
        OSError: it can't be written.
    """
    data = {"units": UNITS, "runs": [result]}
    text = msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n"
    replace_file(path, text, new_mode=0o666)


def progress_text(progress: RunProgress, now_s: float) -> str:
    """Return one line about a run so far."""
    outcomes = progress.outcomes
    return (
        f"{now_s:,.0f} s · {progress.n_sent:,} of {progress.n_planned:,} sent"
        f" · {progress.n_in_flight:,} in flight · {outcomes['finished']:,} finished"
        f" · {outcomes['refused']:,} refused · {outcomes['failed']:,} failed"
    )


@asynccontextmanager
async def show_progress(
    console: Console, progress: RunProgress, clock: Callable[[], float]
) -> AsyncIterator[None]:
    """Show a run while the block lasts, if the console is a terminal."""

    async def draw() -> None:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(progress_text(progress, clock()), refresh=True)
                await asyncio.sleep(_EVERY_S)

    drawing = asyncio.create_task(draw()) if console.is_terminal else None
    try:
        yield
    finally:
        if drawing is not None:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)


def print_result(result: BenchResult, console: Console) -> None:
    """Print a run as a table, with reasons of refusals and warnings."""
    summary = result.summary
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in _rows(result):
        table.add_row(name, value)
    console.print(table)
    if not summary.n_finished:
        console.print(Text(NO_SUCCESS, "red"), soft_wrap=True)
    for kind, reasons in (("refused", summary.refusals), ("failed", summary.failures)):
        for reason, n in reasons.items():
            console.print(Text(f"{n:,} {kind}: {reason}", "yellow"), soft_wrap=True)
    for warning in result_warnings(summary):
        console.print(Text(warning, "yellow"), soft_wrap=True)


def _rows(result: BenchResult) -> list[tuple[str, str]]:
    summary = result.summary
    counts = [
        ("finished", f"{summary.n_finished:,} of {summary.n_requests:,} requests"),
        ("refused, failed", f"{summary.n_refused:,}, {summary.n_failed:,}"),
        ("duration", f"{summary.duration_s:,.1f} s"),
    ]
    if not summary.n_finished:
        return counts
    return [
        *counts,
        (
            "requests/s",
            f"{summary.finished_per_s:,.2f} finished, {summary.offered_per_s:,.2f} offered",
        ),
        (
            "tokens/s",
            f"{summary.prompt_tokens_per_s:,.0f} in, {summary.output_tokens_per_s:,.0f} out",
        ),
        ("cached", _cached(summary)),
        ("", "mean / p50 / p90 / p99 / max"),
        ("TTFT", _quantiles(summary.ttft_s)),
        ("TBT, mean of a request", _quantiles(summary.tbt_s)),
        ("TBT, its longest 10 %", _quantiles(summary.tbt_tail_s)),
        ("TBT, all gaps", _quantiles(summary.gap_s)),
        ("end to end", _quantiles(summary.e2e_s)),
        ("good", f"{summary.n_good:,} ({summary.good_share:.1%})"),
        *_limits(result),
        ("goodput", f"{summary.goodput_per_s:,.2f} requests/s"),
        ("in flight", f"{summary.generator.most_in_flight:,} at most"),
        (
            "this process late, p99",
            f"{format_seconds(summary.generator.send_lag_s.p99)} to send,"
            f" {format_seconds(summary.generator.loop_lag_s.p99)} its event loop",
        ),
    ]


def _cached(summary: BenchSummary) -> str:
    if summary.n_cached_tokens is None:
        return "unknown: the endpoint does not say"
    share = summary.n_cached_tokens / max(1, summary.n_prompt_tokens)
    return f"{share:.1%} of {summary.n_prompt_tokens:,} prompt tokens"


def _limits(result: BenchResult) -> list[tuple[str, str]]:
    summary, slo = result.summary, result.settings.slo
    rows: list[tuple[str, str]] = []
    if slo.ttft_s is not None:
        rows.append((f"  TTFT ≤ {format_seconds(slo.ttft_s)}", f"{summary.n_missed_ttft:,} missed"))
    if slo.tbt_s is not None:
        text = f"  TBT ({slo.tbt_by}) ≤ {format_seconds(slo.tbt_s)}"
        rows.append((text, f"{summary.n_missed_tbt:,} missed"))
    return rows or [("", "no limits were given: all that finished are good")]


def result_warnings(summary: BenchSummary) -> list[str]:
    """Return the reasons for which a run's figures are doubtful."""
    found: list[str] = []
    lag = summary.generator
    if lag.lags:
        found.append(
            "this process was late itself (event loop p99 "
            f"{format_seconds(lag.loop_lag_s.p99)}, sending"
            f" p99 {format_seconds(lag.send_lag_s.p99)}): the times above have that in them;"
            " send less,"
            " or from a machine with time to spare"
        )
    if lag.n_held:
        found.append(
            f"{lag.n_held:,} requests waited for --max-in-flight, and their times have that wait"
        )
    if summary.bundled > 0.01:
        found.append(
            f"{summary.bundled:.0%} of the tokens came in one event with another: gaps are between"
            " events, means are per token"
        )
    if summary.cut_short:
        found.append("stopped early: requests that were under way are not counted")
    return found


def _quantiles(values: DistributionSummary) -> str:
    if math.isnan(values.mean):
        return "–"
    numbers = (values.mean, values.p50, values.p90, values.p99, values.max)
    return " / ".join(format_seconds(value) for value in numbers)
