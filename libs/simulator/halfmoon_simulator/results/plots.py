"""Pictures of runs, by matplotlib: distributions, and the cluster over time."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from halfmoon_simulator.results.run_results import ClusterSample, RunResult

Runs = Sequence[tuple[str, RunResult]]

#: Samples that hit rates and rejections are counted over.
_WINDOW = 12
_COLOURS = ("blue", "orange", "green", "red", "purple", "brown", "pink", "gray", "olive", "cyan")
#: More runs than colours go on with other dashes.
_DASHES = ("-", "--", "-.", ":")


def save_plots(runs: Runs, folder: Path, *, over_rates: bool = False) -> list[Path]:
    """Write one PNG per picture; returns their paths.

    Args:
        runs: labels and results; drawn together.
        folder: made if it is not there.
        over_rates: the runs differ in how fast requests come, and their labels say so behind
            an @: adds goodput over rate.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Figure], None]] = {
        "ttft": lambda figure: _ttft(_axes(figure), runs),
        "tbt": lambda figure: _tbt(_axes(figure), runs),
        "load": lambda figure: _load(figure, runs),
        "hit_rate": lambda figure: _hit_rate(_axes(figure), runs),
        "rejections": lambda figure: _rejections(_axes(figure), runs),
    }
    if over_rates:
        pictures["goodput"] = lambda figure: _goodput(_axes(figure), runs)
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


def _axes(figure: Figure) -> Axes:
    return _ready(figure.subplots())


def _ready(axes: Axes) -> Axes:
    axes.set_prop_cycle(
        color=[f"tab:{colour}" for _ in _DASHES for colour in _COLOURS],
        linestyle=[dash for dash in _DASHES for _ in _COLOURS],
    )
    axes.grid(alpha=0.3)
    return axes


def _legend(axes: Axes, runs: Runs) -> None:
    axes.legend(fontsize="small" if len(runs) <= 8 else "xx-small", framealpha=0.6)


def _ttft(axes: Axes, runs: Runs) -> None:
    for label, result in runs:
        _shares(axes, [r.ttft_s for r in result.records if r.ttft_s is not None], label)
    _limit(axes, runs[0][1].ttft_slo_s)
    axes.set(title="Time to first token", xlabel="s, log scale")
    _legend(axes, runs)


def _tbt(axes: Axes, runs: Runs) -> None:
    for label, result in runs:
        _shares(
            axes,
            [r.intervals.longest_tenth_s() for r in result.finished() if r.intervals.runs],
            label,
        )
    _limit(axes, runs[0][1].tbt_slo_s)
    axes.set(
        title="Time between tokens: the mean of each request's longest tenth",
        xlabel="s, log scale",
    )
    _legend(axes, runs)


def _shares(axes: Axes, values: Sequence[float], label: str) -> None:
    """Draw the share of requests that had no more than x."""
    ordered = sorted(values)
    n = max(1, len(ordered))
    axes.step(ordered, [(i + 1) / n for i in range(len(ordered))], where="post", label=label)
    axes.set(ylabel="share of requests", xscale="log", ylim=(0, 1.02))
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _limit(axes: Axes, slo_s: float | None) -> None:
    if slo_s is not None:
        axes.axvline(slo_s, linestyle=":", color="black", label=f"SLO, {slo_s:g} s")


def _load(figure: Figure, runs: Runs) -> None:
    upper, lower = (_ready(axes) for axes in figure.subplots(2, 1, sharex=True))
    for label, result in runs:
        at_s = [sample.at_s for sample in result.samples]
        ttft_slo_s, tbt_slo_s = result.ttft_slo_s or 1.0, result.tbt_slo_s or 1.0
        upper.plot(at_s, [s.prefill_backlog_s / ttft_slo_s for s in result.samples], label=label)
        lower.plot(at_s, [s.decode_step_s / tbt_slo_s for s in result.samples], label=label)
    of_ttft, of_tbt = runs[0][1].ttft_slo_s, runs[0][1].tbt_slo_s
    upper.set(title="Load of both pools, mean over their workers", ylim=(0, None))
    upper.set(ylabel="prefill: backlog, s" if of_ttft is None else "prefill: backlog / SLO")
    lower.set(xlabel="time, s", ylim=(0, None))
    lower.set(ylabel="decode: step, s" if of_tbt is None else "decode: step / SLO")
    _legend(upper, runs)


def _hit_rate(axes: Axes, runs: Runs) -> None:
    for label, result in runs:
        points = rates_over_time(result.samples)
        axes.plot([at_s for at_s, _, _ in points], [share for _, share, _ in points], label=label)
    axes.set(title=f"Prompt tokens found cached, {_window(runs)}")
    axes.set(xlabel="time, s", ylabel="share", ylim=(0, 1))
    _legend(axes, runs)


def _rejections(axes: Axes, runs: Runs) -> None:
    for label, result in runs:
        points = rates_over_time(result.samples)
        axes.plot([at_s for at_s, _, _ in points], [rate for _, _, rate in points], label=label)
    axes.set(title=f"Rejected requests, {_window(runs)}")
    # Without rejections the line lies on the axis, and the picture says so.
    axes.set(xlabel="time, s", ylabel="per second", ylim=(0, max(0.1, axes.get_ylim()[1])))
    _legend(axes, runs)


def _window(runs: Runs) -> str:
    samples = runs[0][1].samples
    if len(samples) < 2:
        return "over the run"
    return f"over the last {_WINDOW * (samples[1].at_s - samples[0].at_s):g} s"


def rates_over_time(samples: Sequence[ClusterSample]) -> list[tuple[float, float, float]]:
    """(time, hit rate, rejections per second) over a sliding window, shorter at the start."""
    points: list[tuple[float, float, float]] = []
    for i, after in enumerate(samples[1:], 1):
        before = samples[max(0, i - _WINDOW)]
        cached = after.cached_tokens - before.cached_tokens
        prompt = cached + after.computed_tokens - before.computed_tokens
        seconds = after.at_s - before.at_s
        rejected = (after.n_rejected - before.n_rejected) / seconds
        points.append((after.at_s, cached / prompt if prompt else 0.0, rejected))
    return points


def _goodput(axes: Axes, runs: Runs) -> None:
    groups: dict[str, list[tuple[float, float]]] = {}
    for label, result in runs:
        arrived = [record.arrived_s for record in result.records]
        span_s = max(arrived) - min(arrived) if arrived else 0.0
        offered = len(arrived) / span_s if span_s else 0.0
        good = result.summary().n_good / span_s if span_s else 0.0
        groups.setdefault(label.split(" @", 1)[0], []).append((offered, good))
    for name, points in groups.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    top = max(offered for points in groups.values() for offered, _ in points)
    axes.plot([0, top], [0, top], linestyle=":", color="black", label="all of them")
    axes.set(title="Goodput over rate", ylim=(0, None), xlim=(0, None))
    axes.set(xlabel="requests per second", ylabel="of them within both SLOs, per second")
    _legend(axes, runs)
