"""A run on a terminal: two lines while it goes on, a table when it is over."""

import asyncio
from bisect import insort
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from halfmoon_cli.bench.bench_run import BenchResult
from halfmoon_cli.bench.load.load_generator import RunProgress
from halfmoon_cli.bench.report.run_summary import BenchSummary
from halfmoon_simulator.results.run_report import format_seconds
from halfmoon_simulator.results.run_results import DistributionSummary

#: Drawing takes milliseconds of the event loop, so it is rare.
_EVERY_S = 0.5
#: Rates are of the last so many seconds.
_WINDOW_S = 5.0


class ProgressText:
    """Text about a run so far; reads new records once each."""

    def __init__(self, tally: RunProgress) -> None:
        self._tally = tally
        self._n_read = 0
        self._n_out = 0
        #: In order of size.
        self._ttfts_s: list[float] = []
        self._tbts_s: list[float] = []
        #: (moment, requests over, tokens out), the oldest first.
        self._marks: list[tuple[float, int, int]] = []

    def text(self, now_s: float) -> Text:
        """Two lines."""
        tally = self._tally
        for record in tally.records[self._n_read :]:
            self._n_out += record.n_out
            if record.outcome == "finished" and record.ttft_s is not None:
                insort(self._ttfts_s, record.ttft_s)
            if record.outcome == "finished" and record.tbt_s is not None:
                insort(self._tbts_s, record.tbt_s)
        self._n_read = len(tally.records)
        self._marks.append((now_s, self._n_read, self._n_out))
        while self._marks[0][0] < now_s - _WINDOW_S:
            self._marks.pop(0)
        then_s, n_then, n_out_then = self._marks[0]
        over_s = max(now_s - then_s, 1e-9)
        outcomes = tally.outcomes
        counts = (
            f"{now_s:,.0f} s · {tally.n_sent:,} of {tally.n_planned:,} sent"
            f" · {tally.n_in_flight:,} in flight · {outcomes['finished']:,} finished"
            f" · {outcomes['refused']:,} refused · {outcomes['failed']:,} failed"
        )
        rates = (
            f"{(self._n_read - n_then) / over_s:,.1f} requests/s"
            f" · {(self._n_out - n_out_then) / over_s:,.0f} tokens/s"
            f" · TTFT p50 {_rank(self._ttfts_s, 0.5)} p99 {_rank(self._ttfts_s, 0.99)}"
            f" · TBT p50 {_rank(self._tbts_s, 0.5)} p99 {_rank(self._tbts_s, 0.99)}"
        )
        return Text(f"{counts}\n{rates}", no_wrap=True, overflow="ellipsis")


def _rank(ordered: Sequence[float], q: float) -> str:
    return format_seconds(ordered[min(len(ordered) - 1, int(q * len(ordered)))]) if ordered else "–"


@asynccontextmanager
async def show_progress(
    console: Console, tally: RunProgress, clock: Callable[[], float]
) -> AsyncIterator[None]:
    """Show a run while the block lasts; nothing where there is no terminal."""
    if not console.is_terminal:
        yield
        return
    progress = ProgressText(tally)
    with Live(console=console, auto_refresh=False, transient=True) as live:

        async def draw() -> None:
            while True:
                live.update(progress.text(clock()), refresh=True)
                await asyncio.sleep(_EVERY_S)

        drawing = asyncio.create_task(draw())
        try:
            yield
        finally:
            drawing.cancel()
            with suppress(asyncio.CancelledError):
                await drawing


def print_result(result: BenchResult, console: Console) -> None:
    """Everything about a run that a person wants to know."""
    summary = result.summary
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in _rows(result):
        table.add_row(name, value)
    console.print(table)
    for kind, reasons in (("refused", summary.refusals), ("failed", summary.failures)):
        for reason, n in reasons.items():
            console.print(Text(f"{n:,} {kind}: {reason}", "yellow"), soft_wrap=True)
    for warning in result_warnings(summary):
        console.print(Text(warning, "yellow"), soft_wrap=True)


def _rows(result: BenchResult) -> list[tuple[str, str]]:
    summary = result.summary
    return [
        ("finished", f"{summary.n_finished:,} of {summary.n_requests:,} requests"),
        ("refused, failed", f"{summary.n_refused:,}, {summary.n_failed:,}"),
        ("duration", f"{summary.duration_s:,.1f} s"),
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
    """What makes a run's figures doubtful."""
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
    numbers = (values.mean, values.p50, values.p90, values.p99, values.max)
    return " / ".join(format_seconds(value) for value in numbers)
