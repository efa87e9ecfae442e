"""Measure admission on a live cluster under overload, beside fixed margins.

    python -m benchmarks.overload                          # 60 s at 2 and 5 times what is served
    python -m benchmarks.overload --minutes 10 --fixed ''  # the learnt margin, and memory
    python -m benchmarks.overload --seconds 40 --fixed 1,0.75,0.5

A cluster of 1 prefill, 1 decode and 1 kvstore with a random model is calibrated first: its latency
alone gives the limits, and 16 requests at once give the most that it serves. Each margin then gets
a new cluster and the same arrivals. At the end a summary says whether the goals are kept.
"""

import argparse
import asyncio
from collections.abc import Callable

from rich.console import Console

from benchmarks.cluster import running_cluster
from benchmarks.model import random_model
from benchmarks.overload.load import Calibration, LoadDriver, OverloadRun, RunReport
from benchmarks.overload.tables import LEARNT, LoadRuns, Margin, milliseconds, summary

#: Seconds for which the most that can be served is measured.
CALIBRATION_S = 20.0
#: Requests that are alone, and requests before anything is measured.
ALONE, WARM_UP = 20, 8
#: Seconds that a cluster takes to start, to warm up and to end, about; for the forecast alone.
_AROUND_S = 15.0


def main() -> None:
    """Calibrate, run all margins, print the tables."""
    parser = argparse.ArgumentParser("benchmarks.overload", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--minutes", type=float, help="of the loads with the learnt margin")
    parser.add_argument("--times", default="2,5", help="loads, as multiples of what is served")
    parser.add_argument(
        "--fixed",
        default="1,0.9,0.8,0.7",
        help="shares of the limits that a conductor without a learnt margin is given, each over 0"
        " and at most 1: 1 is no margin, 0.75 one of 25 %%; '': none of these runs",
    )
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and prompts")
    options = parser.parse_args()
    times = [float(each) for each in options.times.split(",")]
    fixed = [float(each) for each in options.fixed.split(",") if each]
    if wrong := [share for share in fixed if not 0 < share <= 1]:
        parser.error(
            f"--fixed has {wrong[0]:g}: each is a share of the limits, over 0 and at most 1;"
            f" a margin of 25 % is 0.75, and no margin is 1"
        )
    margins = [LEARNT, *map(Margin.fixed, fixed)]
    seconds = {
        margin: options.minutes * 60 if margin is LEARNT and options.minutes else options.seconds
        for margin in margins
    }
    console = Console()
    whole_s = len(times) * (sum(seconds.values()) + _AROUND_S * len(margins))
    console.print(
        f"{len(times)} loads, {len(margins)} margins: takes about"
        f" {(whole_s + CALIBRATION_S + 2 * _AROUND_S) / 60:.0f} minutes"
    )
    done: list[LoadRuns] = []
    with random_model() as model:
        found = asyncio.run(_calibrate(model, options.seed))
        slo = found.slo
        console.print(
            f"served at most {found.served_per_s:.2f} requests/s; alone at P90"
            f" {milliseconds(found.alone.ttft_s)} to the first token and"
            f" {milliseconds(found.alone.tbt_s)} between tokens; limits"
            f" {milliseconds(slo.ttft_s)} and {milliseconds(slo.tbt_s)}"
        )
        for factor in times:
            load = LoadRuns(factor, found)
            done.append(load)
            for margin in margins:
                name = f"{factor:g}×, {margin.name}"

                def report(one: RunReport, name: str = name) -> None:
                    console.print(f"  {name}: {one.describe(slo)}", style="dim", highlight=False)

                run = _run(model, margin, load, seconds[margin], options.seed, report)
                load.runs.append((margin, asyncio.run(run)))
            console.print(load.table())
            console.print(load.memory_table())
    console.print(summary(done))


async def _calibrate(model: str, seed: int) -> Calibration:
    with running_cluster(model) as cluster:
        async with LoadDriver(cluster.plan.url, seed) as driver:
            for _ in range(WARM_UP):
                await driver.one()
            alone = await driver.alone(ALONE)
            return Calibration(alone, await driver.saturated(CALIBRATION_S))


async def _run(
    model: str,
    margin: Margin,
    load: LoadRuns,
    seconds: float,
    seed: int,
    report: Callable[[RunReport], None],
) -> OverloadRun:
    flags = margin.flags(load.found.slo)
    with running_cluster(model, extra={"conductor": flags}) as cluster:
        pids = {name: process.pid for name, process in cluster.processes.items()}
        async with LoadDriver(cluster.plan.url, seed) as driver:
            for _ in range(WARM_UP):
                await driver.one()
            return await driver.overload(
                load.rate_per_s, seconds, pids, load.found.alone, report=report
            )


if __name__ == "__main__":
    main()
