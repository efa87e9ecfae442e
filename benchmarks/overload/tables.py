"""Show the runs of an overload: margins side by side, memory, and whether the goals are kept."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

from benchmarks.overload.load import Calibration, OverloadRun
from halfmoon_cli.bench.bench_record import Slo

#: The goals: the share of the admitted within their limits, and seconds until requests are as fast
#: as alone again.
SHARE_GOAL, RECOVERY_GOAL_S = 0.9, 2.0


@dataclass(frozen=True)
class Margin:
    """A way to compare predictions with limits."""

    name: str
    #: The quantile of the errors; 0: the mean prediction.
    quantile: float = 0.0
    #: The share of the limits that the conductor is given.
    share: float = 1.0

    @classmethod
    def fixed(cls, share: float) -> "Margin":
        """Return the margin that leaves this share of the limits."""
        return cls("none: the mean" if share == 1 else f"fixed, {1 - share:.0%}", share=share)

    def flags(self, slo: Slo) -> list[str]:
        """Return the conductor's flags."""
        assert slo.ttft_s is not None and slo.tbt_s is not None
        return [
            f"--ttft-slo-s={slo.ttft_s * self.share}",
            f"--tbt-slo-s={slo.tbt_s * self.share}",
            f"--admission-quantile={self.quantile}",
        ]


LEARNT = Margin("learnt", quantile=0.9)


@dataclass
class LoadRuns:
    """The runs of one load; the learnt margin's is the first."""

    #: The load as a multiple of what is served.
    factor: float
    found: Calibration
    runs: list[tuple[Margin, OverloadRun]] = field(default_factory=list)

    @property
    def rate_per_s(self) -> float:
        """Arrivals per second."""
        return self.factor * self.found.served_per_s

    @property
    def name(self) -> str:
        """The load in words."""
        return f"{self.factor:g}× ({self.rate_per_s:.1f}/s)"

    def table(self) -> Table:
        """Return all margins side by side."""
        slo = self.found.slo
        table = Table(title=f"{self.name}, goodput in requests/s", box=None)
        for column in (
            "margin",
            "requests",
            "refused",
            "with Retry-After",
            "failed",
            "admitted in limits",
            "of the first 20 s",
            "missed TTFT / TBT",
            "good/s",
            "TTFT P50 / P90",
            "back to normal",
        ):
            table.add_column(column, justify="right")
        for margin, run in self.runs:
            admitted, refused = run.admitted(), run.refused()
            missed = Counter(reason for record in admitted for reason in slo.missed(record))
            ttfts_s = [record.ttft_s for record in admitted if record.ttft_s is not None]
            table.add_row(
                margin.name,
                str(len(run.records)),
                f"{len(refused) / max(1, len(run.records)):.0%}",
                _retry_after(run),
                str(missed["failed"]),
                f"{run.share_good(slo):.1%}",
                f"{run.share_good(slo, until_s=20.0):.1%}",
                f"{missed['ttft']} / {missed['tbt']}",
                f"{run.n_good(slo) / run.seconds:.2f}",
                " / ".join(milliseconds(_quantile(ttfts_s, q)) for q in (0.5, 0.9)),
                _recovery(run),
            )
        others = [(run.n_good(slo) / run.seconds, margin.name) for margin, run in self.runs[1:]]
        if others:
            best, name = max(others)
            ours = self.runs[0][1].n_good(slo) / self.runs[0][1].seconds
            ratio = f"{ours / best:.2f} times" if best else "nothing good in"
            table.caption = f"learnt: {ratio} the best of the others ({name}, {best:.2f} good/s)"
        return table

    def memory_table(self) -> Table:
        """Return resident memory in the run of the first margin."""
        margin, run = self.runs[0]
        title = f"resident MiB at {self.factor:g}×, {margin.name}, quarters of the run"
        table = Table(title=title, box=None)
        for column in ("process", "1st", "2nd", "3rd", "4th", "flat"):
            table.add_column(column, justify="right")
        for name in run.memory.samples:
            quarters = [f"{value:.0f}" for value in run.memory.quarters(name)]
            table.add_row(name, *quarters, "yes" if run.memory.is_flat(name) else "NO")
        return table


def summary(loads: Sequence[LoadRuns]) -> Table:
    """Return what the learnt margin did at each load beside the goals; NO marks one missed."""
    table = Table(title="the learnt margin beside the goals", box=None)
    for column in (
        "load",
        "seconds",
        f"admitted in limits (≥ {SHARE_GOAL:.0%})",
        "good/s",
        "to the best fixed (≥ 1)",
        "refusals with Retry-After (all)",
        "memory flat",
        f"back to normal (≤ {RECOVERY_GOAL_S:g} s)",
    ):
        table.add_column(column, justify="right")
    for load in loads:
        slo, (_, run) = load.found.slo, load.runs[0]
        share = run.share_good(slo)
        good = run.n_good(slo) / run.seconds
        best = max((other.n_good(slo) / other.seconds for _, other in load.runs[1:]), default=0.0)
        grown = [name for name in run.memory.samples if not run.memory.is_flat(name)]
        is_back = run.recovered_s is not None and run.recovered_s <= RECOVERY_GOAL_S
        table.add_row(
            load.name,
            f"{run.seconds:.0f}",
            _marked(f"{share:.1%}", is_kept=share >= SHARE_GOAL),
            f"{good:.2f}",
            _marked(f"{good / best:.2f}", is_kept=good >= best) if best else "–",
            _marked(
                _retry_after(run), is_kept=all(record.has_retry_after for record in run.refused())
            ),
            _marked(f"{', '.join(grown)} grew" if grown else "yes", is_kept=not grown),
            _marked(_recovery(run), is_kept=is_back),
        )
    return table


def milliseconds(seconds: float | None) -> str:
    """Return seconds as milliseconds, in words."""
    return "–" if seconds is None else f"{seconds * 1e3:.0f} ms"


def _marked(text: str, *, is_kept: bool) -> str:
    return text if is_kept else f"NO: {text}"


def _retry_after(run: OverloadRun) -> str:
    refused = run.refused()
    return f"{sum(record.has_retry_after for record in refused)} of {len(refused)}"


def _recovery(run: OverloadRun) -> str:
    return "never" if run.recovered_s is None else f"{run.recovered_s:.2f} s"


def _quantile(values: Sequence[float], q: float) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100)[round(q * 100) - 1]
