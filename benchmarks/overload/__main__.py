"""Measure admission on a live cluster under overload, beside fixed margins.

    python -m benchmarks.overload                  # 60 s at 2 and 5 times what can be served
    python -m benchmarks.overload --minutes 10     # the learnt margin for so long, for memory

A cluster of 1 prefill, 1 decode and 1 kvstore with a random model is calibrated first: its latency
alone gives the limits, and 16 requests at once give the most that it serves. Each margin then gets
a new cluster and the same arrivals.
"""

import argparse
import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.cluster import running_cluster
from benchmarks.model import random_model
from benchmarks.overload.load import Calibration, LoadDriver, OverloadRun
from halfmoon_cli.bench.bench_record import Slo

#: Seconds for which the most that can be served is measured.
CALIBRATION_S = 20.0
#: Requests that are alone, and requests before anything is measured.
ALONE, WARM_UP = 20, 8


@dataclass(frozen=True)
class Margin:
    """A way to compare predictions with limits."""

    name: str
    #: The quantile of the errors; 0: the mean prediction.
    quantile: float = 0.0
    #: The share of the limits that the conductor is given.
    share: float = 1.0

    def flags(self, slo: Slo) -> list[str]:
        """Return the conductor's flags."""
        assert slo.ttft_s is not None and slo.tbt_s is not None
        return [
            f"--ttft-slo-s={slo.ttft_s * self.share}",
            f"--tbt-slo-s={slo.tbt_s * self.share}",
            f"--admission-quantile={self.quantile}",
        ]


LEARNT = Margin("learnt", quantile=0.9)


def main() -> None:
    """Calibrate, run all margins, print the tables."""
    parser = argparse.ArgumentParser("benchmarks.overload", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--minutes", type=float, help="of the loads with the learnt margin")
    parser.add_argument("--times", default="2,5", help="loads, as multiples of what is served")
    parser.add_argument("--fixed", default="1,0.9,0.8,0.7", help="fixed shares of the limits")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and prompts")
    options = parser.parse_args()
    times = [float(each) for each in options.times.split(",")]
    fixed = [float(each) for each in options.fixed.split(",") if each]
    margins = [LEARNT] + [
        Margin("none: the mean" if share == 1 else f"fixed, {1 - share:.0%}", share=share)
        for share in fixed
    ]
    console = Console()
    with random_model() as model:
        found = asyncio.run(_calibrate(model, options.seed))
        slo = found.slo
        console.print(
            f"served at most {found.served_per_s:.2f} requests/s; alone at P90"
            f" {_ms(found.alone.ttft_s)} to the first token and {_ms(found.alone.tbt_s)} between"
            f" tokens; limits {_ms(slo.ttft_s)} and {_ms(slo.tbt_s)}"
        )
        for factor in times:
            runs: list[tuple[Margin, OverloadRun]] = []
            for margin in margins:
                seconds = options.seconds
                if margin is LEARNT and options.minutes:
                    seconds = options.minutes * 60
                runs.append(
                    (margin, asyncio.run(_run(model, margin, found, factor, seconds, options.seed)))
                )
                console.print(f"  {factor:g}×, {margin.name}: over", style="dim")
            console.print(_table(runs, slo, factor, found))
            console.print(_memory(runs[0][1], factor))


async def _calibrate(model: str, seed: int) -> Calibration:
    with running_cluster(model) as cluster:
        async with LoadDriver(cluster.plan.url, seed) as driver:
            for _ in range(WARM_UP):
                await driver.one()
            alone = await driver.alone(ALONE)
            return Calibration(alone, await driver.saturated(CALIBRATION_S))


async def _run(
    model: str, margin: Margin, found: Calibration, factor: float, seconds: float, seed: int
) -> OverloadRun:
    with running_cluster(model, extra={"conductor": margin.flags(found.slo)}) as cluster:
        pids = {name: process.pid for name, process in cluster.processes.items()}
        async with LoadDriver(cluster.plan.url, seed) as driver:
            for _ in range(WARM_UP):
                await driver.one()
            return await driver.overload(factor * found.served_per_s, seconds, pids, found.alone)


def _table(
    runs: Sequence[tuple[Margin, OverloadRun]], slo: Slo, factor: float, found: Calibration
) -> Table:
    table = Table(title=f"{factor * found.served_per_s:.1f} requests/s ({factor:g}×)", box=None)
    for column in (
        "margin",
        "requests",
        "refused",
        "with Retry-After",
        "failed",
        "admitted in limits",
        "missed TTFT / TBT",
        "good/s",
        "TTFT P50 / P90",
        "back to normal",
    ):
        table.add_column(column, justify="right")
    for margin, run in runs:
        admitted, refused = run.admitted(), run.refused()
        good = run.n_good(slo)
        missed = Counter(reason for record in admitted for reason in slo.missed(record))
        ttfts_s = [record.ttft_s for record in admitted if record.ttft_s is not None]
        table.add_row(
            margin.name,
            str(len(run.records)),
            f"{len(refused) / max(1, len(run.records)):.0%}",
            f"{sum(record.has_retry_after for record in refused)} of {len(refused)}",
            str(missed["failed"]),
            f"{good / max(1, len(admitted)):.1%}",
            f"{missed['ttft']} / {missed['tbt']}",
            f"{good / run.seconds:.2f}",
            " / ".join(_ms(_quantile(ttfts_s, q)) for q in (0.5, 0.9)),
            "never" if run.recovered_s is None else f"{run.recovered_s:.2f} s",
        )
    fixed = [(run.n_good(slo) / run.seconds, margin.name) for margin, run in runs[1:]]
    if fixed:
        best, name = max(fixed)
        ours = runs[0][1].n_good(slo) / runs[0][1].seconds
        ratio = f"{ours / best:.2f} times" if best else "nothing good in"
        table.caption = f"learnt: {ratio} the best of the others ({name}, {best:.2f} good/s)"
    return table


def _memory(run: OverloadRun, factor: float) -> Table:
    table = Table(title=f"resident MiB at {factor:g}×, learnt, quarters of the run", box=None)
    for column in ("process", "1st", "2nd", "3rd", "4th", "flat"):
        table.add_column(column, justify="right")
    for name in run.memory.samples:
        quarters = [f"{value:.0f}" for value in run.memory.quarters(name)]
        table.add_row(name, *quarters, "yes" if run.memory.is_flat(name) else "NO")
    return table


def _quantile(values: Sequence[float], q: float) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100)[round(q * 100) - 1]


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.0f} ms"


if __name__ == "__main__":
    main()
