"""Pictures of runs, by matplotlib: distributions, and the cluster over time."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from halfmoon_simulator.results import RunResult, Sample

Runs = Sequence[tuple[str, RunResult]]


def save_plots(runs: Runs, folder: Path, *, rates: Sequence[float] | None = None) -> list[Path]:
    """Write one PNG per picture; returns their paths.

    Args:
        runs: labels and results; drawn together.
        folder: made if it is not there.
        rates: one per run when the runs differ in rate: adds goodput over rate.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Figure], None]] = {
        "ttft": lambda figure: _ttft(figure.subplots(), runs),
        "tbt": lambda figure: _tbt(figure.subplots(), runs),
        "load": lambda figure: _load(figure, runs),
        "hit_rate": lambda figure: _hit_rate(figure.subplots(), runs),
        "rejections": lambda figure: _rejections(figure.subplots(), runs),
    }
    if rates is not None:
        pictures["goodput"] = lambda figure: _goodput(figure.subplots(), runs, rates)
    paths: list[Path] = []
    for name, draw in pictures.items():
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        path = folder / f"{name}.png"
        # Without the date that PNG files carry: the same run gives the same bytes.
        figure.savefig(path, dpi=120, metadata={"Software": None})
        paths.append(path)
    return paths


def _shares(axes: Axes, values: Sequence[float], label: str) -> None:
    ordered = sorted(values)
    n = max(1, len(ordered))
    axes.step(ordered, [(i + 1) / n for i in range(len(ordered))], where="post", label=label)


def _ttft(axes: Axes, runs: Runs) -> None:
    for label, result in runs:
        _shares(axes, [r.ttft_s for r in result.records if r.ttft_s is not None], label)
    _limit(axes, runs[0][1].ttft_slo_s)
    axes.set(xlabel="time to first token, s", ylabel="share of requests", xscale="log")
    axes.legend()


def _tbt(axes: Axes, runs: Runs) -> None:
    for label, result in runs:
        _shares(
            axes,
            [r.intervals.longest_tenth_s() for r in result.finished() if r.intervals.runs],
            label,
        )
    _limit(axes, runs[0][1].tbt_slo_s)
    axes.set(
        xlabel="time between tokens, mean of a request's longest tenth, s",
        ylabel="share of requests",
        xscale="log",
    )
    axes.legend()


def _limit(axes: Axes, slo_s: float | None) -> None:
    if slo_s is not None:
        axes.axvline(slo_s, linestyle=":", color="black", label="SLO")


def _load(figure: Figure, runs: Runs) -> None:
    upper, lower = figure.subplots(2, 1, sharex=True)
    for label, result in runs:
        at_s = [sample.at_s for sample in result.samples]
        ttft_slo_s, tbt_slo_s = result.ttft_slo_s or 1.0, result.tbt_slo_s or 1.0
        upper.plot(at_s, [s.prefill_backlog_s / ttft_slo_s for s in result.samples], label=label)
        lower.plot(at_s, [s.decode_step_s / tbt_slo_s for s in result.samples], label=label)
    has_slos = runs[0][1].ttft_slo_s is not None
    upper.set(ylabel="prefill: backlog / SLO" if has_slos else "prefill: backlog, s")
    lower.set(xlabel="s", ylabel="decode: step / SLO" if has_slos else "decode: step, s")
    upper.legend()


def _hit_rate(axes: Axes, runs: Runs) -> None:
    for label, result in runs:
        points = _changes(result.samples)
        axes.plot([at_s for at_s, _, _ in points], [share for _, share, _ in points], label=label)
    axes.set(xlabel="s", ylabel="prompt tokens found cached, share", ylim=(0, 1))
    axes.legend()


def _rejections(axes: Axes, runs: Runs) -> None:
    for label, result in runs:
        points = _changes(result.samples)
        axes.plot([at_s for at_s, _, _ in points], [rate for _, _, rate in points], label=label)
    axes.set(xlabel="s", ylabel="rejected requests per s")
    axes.legend()


def _changes(samples: Sequence[Sample], window: int = 12) -> list[tuple[float, float, float]]:
    """(time, hit rate, rejections per second) over sliding windows of samples."""
    points: list[tuple[float, float, float]] = []
    for before, after in zip(samples, samples[window:], strict=False):
        cached = after.cached_tokens - before.cached_tokens
        prompt = cached + after.computed_tokens - before.computed_tokens
        seconds = after.at_s - before.at_s
        rejected = (after.n_rejected - before.n_rejected) / seconds
        points.append((after.at_s, cached / prompt if prompt else 0.0, rejected))
    return points


def _goodput(axes: Axes, runs: Runs, rates: Sequence[float]) -> None:
    groups: dict[str, list[tuple[float, float]]] = {}
    for (label, result), rate in zip(runs, rates, strict=True):
        name = label.split(" @", 1)[0]
        groups.setdefault(name, []).append((rate, result.summary().goodput_per_s))
    for name, points in groups.items():
        points.sort()
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xlabel="requests per s", ylabel="requests per s within both SLOs")
    axes.legend()
