"""A run's summary for a terminal and for programs."""

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from halfmoon_simulator.results.run_results import DistributionSummary, RunResult, RunSummary

#: Up to so many runs stand side by side, with every figure; more are a row each, with fewer.
_SIDE_BY_SIDE = 4


class NamedSummary(msgspec.Struct, frozen=True):
    """A run's label and its summary."""

    label: str
    summary: RunSummary


def print_summaries(runs: Sequence[NamedSummary], console: Console) -> None:
    """Build a table of runs that fits a terminal."""
    table = Table(box=None, pad_edge=False)
    if len(runs) <= _SIDE_BY_SIDE:
        table.add_column("")
        for run in runs:
            table.add_column(run.label, justify="right")
        for cells in zip(*(_figures(run.summary) for run in runs), strict=True):
            table.add_row(cells[0][0], *(value for _, value in cells))
    else:
        table.add_column("run")
        for column in ("refused", "TTFT", "p99", "TBT tail p90", "reused", "good", "good/s"):
            table.add_column(column, justify="right")
        for run in runs:
            table.add_row(run.label, *_row(run.summary))
    console.print(table)


def _refused(summary: RunSummary) -> str:
    text = f"{summary.n_rejected} + {summary.n_wasted} late"
    text = text if summary.n_wasted else str(summary.n_rejected)
    return f"{text}, {summary.n_failed} failed" if summary.n_failed else text


def _row(summary: RunSummary) -> list[str]:
    return [
        _refused(summary),
        format_seconds(summary.ttft_s.mean),
        format_seconds(summary.ttft_s.p99),
        format_seconds(summary.tbt_tail_s.p90),
        f"{summary.reused:.3f}",
        f"{summary.n_good / max(1, summary.n_requests):.1%}",
        f"{summary.goodput_per_s:.2f}",
    ]


def _figures(summary: RunSummary) -> list[tuple[str, str]]:
    share = summary.n_good / max(1, summary.n_requests)
    return [
        ("requests", f"{summary.n_requests:,}"),
        ("finished", f"{summary.n_finished:,}"),
        ("refused", _refused(summary)),
        ("seconds", f"{summary.duration_s:,.0f}"),
        ("TTFT mean", format_seconds(summary.ttft_s.mean)),
        ("TTFT p50 / p90 / p99", _quantiles(summary.ttft_s)),
        ("TBT mean", format_seconds(summary.tbt_s.mean)),
        ("TBT tail p50 / p90 / p99", _quantiles(summary.tbt_tail_s)),
        ("prompt tokens reused", f"{summary.reused:.1%}"),
        ("of turn 1, 2, …", " / ".join(f"{share:.1%}" for share in summary.reused_by_turn) or "–"),
        ("blocks read, memory / disk", f"{summary.n_from_memory:,} / {summary.n_from_disk:,}"),
        ("copied ahead of requests", f"{summary.copied_bytes / 1e9:,.1f} GB"),
        ("changes of roles", f"{summary.n_role_changes}"),
        ("output tokens/s", f"{summary.output_tokens_per_s:,.0f}"),
        ("good (within both SLOs)", f"{summary.n_good:,} ({share:.1%})"),
        ("good/s", f"{summary.goodput_per_s:.2f}"),
        (
            "engines busy, prefill / decode",
            f"{summary.prefill_busy:.0%} / {summary.decode_busy:.0%}",
        ),
        (
            "load swing, prefill / decode",
            f"{summary.prefill_load_std:.3f} / {summary.decode_load_std:.3f}",
        ),
    ]


def _quantiles(values: DistributionSummary) -> str:
    return " / ".join(format_seconds(value) for value in (values.p50, values.p90, values.p99))


def format_seconds(value: float) -> str:
    """Format a time with its unit, three digits."""
    if value < 1e-9:
        return "0"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def results_to_json(runs: Sequence[tuple[str, RunResult]], *, with_requests: bool = False) -> str:
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
                    "turn": record.turn,
                    "attempts": record.attempts,
                    "prefill": record.prefill,
                    "decode": record.decode,
                    "why": record.why,
                    "tbt_mean_s": record.intervals.mean_s,
                    "tbt_tail_s": record.intervals.longest_tenth_s(),
                    "tbt_max_s": record.intervals.max_s,
                }
                for record in sorted(result.records, key=lambda record: record.index)
            ]
        rows.append(row)
    return msgspec.json.format(msgspec.json.encode(rows), indent=1).decode() + "\n"
