"""A run's summary for a terminal and for programs."""

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from halfmoon_simulator.results import RunResult, Spread, Summary

_COLUMNS = (
    "run",
    "requests",
    "finished",
    "rejected",
    "TTFT mean",
    "p50",
    "p90",
    "p99",
    "TBT mean",
    "tail p90",
    "reused",
    "good",
    "good/s",
    "busy P/D",
)


class NamedSummary(msgspec.Struct, frozen=True):
    """A run's label and its summary."""

    label: str
    summary: Summary


def print_summaries(runs: Sequence[NamedSummary], console: Console) -> None:
    """One row per run."""
    table = Table(box=None, pad_edge=False)
    for i, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if i == 0 else "right")
    for run in runs:
        table.add_row(run.label, *_cells(run.summary))
    console.print(table)


def _cells(summary: Summary) -> list[str]:
    refused = str(summary.n_rejected)
    if summary.n_wasted:
        refused = f"{summary.n_rejected} + {summary.n_wasted} late"
    if summary.n_failed:
        refused += f", {summary.n_failed} failed"
    ttft = summary.ttft_s
    return [
        str(summary.n_requests),
        str(summary.n_finished),
        refused,
        *(seconds(value) for value in (ttft.mean, ttft.p50, ttft.p90, ttft.p99)),
        seconds(summary.tbt_s.mean),
        seconds(summary.tbt_tail_s.p90),
        f"{summary.reused:.3f}",
        f"{summary.n_good} ({summary.n_good / max(1, summary.n_requests):.1%})",
        f"{summary.goodput_per_s:.2f}",
        f"{summary.prefill_busy:.2f}/{summary.decode_busy:.2f}",
    ]


def seconds(value: float) -> str:
    """A time with its unit, three digits."""
    if value < 1e-9:
        return "0"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def spread_row(spread: Spread) -> list[str]:
    """A distribution as cells."""
    values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
    return [seconds(value) for value in values]


def to_json(runs: Sequence[tuple[str, RunResult]], *, with_requests: bool = False) -> str:
    """Summaries, timelines and, if wanted, every request; the same run gives the same bytes."""
    rows = []
    for label, result in runs:
        row: dict[str, object] = {
            "label": label,
            "summary": result.summary(),
            "ttft_slo_s": result.ttft_slo_s,
            "tbt_slo_s": result.tbt_slo_s,
            "timeline": {
                "fields": [field.name for field in msgspec.structs.fields(result.samples[0])]
                if result.samples
                else [],
                "rows": result.samples,
            },
        }
        if with_requests:
            row["requests"] = [
                {
                    "index": record.index,
                    "arrived_s": record.arrived_s,
                    "n_input": record.n_input,
                    "n_output": record.n_output,
                    "outcome": record.outcome,
                    "reason": record.reason,
                    "ttft_s": record.ttft_s,
                    "ended_s": record.ended_s,
                    "n_cached": record.n_cached,
                    "attempts": record.attempts,
                    "prefill": record.prefill,
                    "decode": record.decode,
                    "tbt_mean_s": record.intervals.mean_s,
                    "tbt_tail_s": record.intervals.longest_tenth_s(),
                    "tbt_max_s": record.intervals.max_s,
                }
                for record in sorted(result.records, key=lambda record: record.index)
            ]
        rows.append(row)
    return msgspec.json.format(msgspec.json.encode(rows), indent=1).decode() + "\n"
