"""A run as one picture: how TTFT and TBT are distributed, and how they went over time."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from halfmoon_cli.bench.bench_run import BenchResult
from halfmoon_cli.bench.load.bench_record import BenchRecord


def save_plot(path: Path, result: BenchResult) -> None:
    """Write it; the file's name says in which format.

    Raises:
        ValueError: a format that matplotlib does not write.
        OSError: it can't be written.
    """
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{result.model}: {result.description}", fontsize="medium")
    (ttft, tbt), (ttft_over, tbt_over) = figure.subplots(2, 2)
    slo = result.settings.slo
    records = [record for record in result.records if record.outcome == "finished"]
    lost = [record for record in result.records if record.outcome != "finished"]
    _shares(ttft, [r.ttft_s for r in records if r.ttft_s is not None], slo.ttft_s)
    ttft.set(title="Time to first token", xlabel="s", ylabel="share of requests")
    _shares(tbt, [t for r in records if (t := r.tbt_by(slo.tbt_by)) is not None], slo.tbt_s)
    tbt.set(title=f"Time between tokens, {slo.tbt_by} of a request")
    tbt.set(xlabel="s", ylabel="share of requests")
    _over_time(ttft_over, records, [r.ttft_s for r in records], slo.ttft_s)
    ttft_over.set(ylabel="TTFT, s")
    _over_time(tbt_over, records, [r.tbt_by(slo.tbt_by) for r in records], slo.tbt_s)
    tbt_over.set(ylabel="TBT, s")
    if lost:
        ttft_over.plot(
            [r.scheduled_s for r in lost],
            [0.0] * len(lost),
            "x",
            color="tab:red",
            label="refused or failed",
        )
        ttft_over.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _shares(axes: Axes, values: Sequence[float], limit_s: float | None) -> None:
    axes.grid(alpha=0.3)
    if values:
        axes.ecdf(list(values))
    if limit_s is not None:
        axes.axvline(limit_s, linestyle=":", color="black")


def _over_time(
    axes: Axes,
    records: Sequence[BenchRecord],
    values: Sequence[float | None],
    limit_s: float | None,
) -> None:
    axes.grid(alpha=0.3)
    points = [(r.scheduled_s, v) for r, v in zip(records, values, strict=True) if v is not None]
    axes.plot([at_s for at_s, _ in points], [value for _, value in points], ".", markersize=3)
    axes.set(xlabel="when it was to be sent, s", ylim=(0, None))
    if limit_s is not None:
        axes.axhline(limit_s, linestyle=":", color="black")
