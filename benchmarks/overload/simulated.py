"""Compare learnt with fixed margins on the papers' overloads, in simulated time.

    python -m benchmarks.overload.simulated FOLDER

`lookahead` is run with shares of the limits by which a request is good, and with these limits and
learnt errors, which is the rule of the paper's experiment here. FOLDER has the published traces.

The last columns say which limit the admitted missed. A short answer waits for the step under way
when it joins a batch, and has few intervals to make up for it: no admission can change that.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.table import Table

from halfmoon_scheduling.admission.limit_bounds import MIN_INTERVALS
from halfmoon_simulator.papers.experiment_runner import TTFT_SLO_S, ExperimentRunner
from halfmoon_simulator.papers.overload import (
    TBT_SLO_S,
    OverloadCase,
    overload_cases,
    scenario,
)
from halfmoon_simulator.results.run_results import SimRequestRecord
from halfmoon_simulator.scenario import Scenario


@dataclass(frozen=True)
class Margin:
    """A way to compare predictions with limits."""

    name: str
    #: The quantile of the errors; 0: the mean prediction.
    quantile: float = 0.0
    #: The share of the true limits that the conductor is given.
    share: float = 1.0


MARGINS = (
    Margin("none: the mean"),
    Margin("fixed, 5 %", share=0.95),
    Margin("fixed, 10 %", share=0.9),
    Margin("fixed, 20 %", share=0.8),
    Margin("learnt", quantile=0.9),
)


def main(folder: str) -> None:
    """Run all loads with all margins and print the table."""
    bench = ExperimentRunner(folder=folder)
    loads = overload_cases(bench)
    results = iter(bench.run([_scenario(load, margin) for load in loads for margin in MARGINS]))
    table = Table(box=None)
    for column in (
        "margin",
        "refused",
        "good",
        "share of the admitted",
        "missed TTFT",
        "missed TBT",
        f"of those, answers of up to {MIN_INTERVALS} tokens",
    ):
        table.add_column(column, justify="right")
    for load in loads:
        table.add_row(f"{load.name}, {load.n_prefill}P+{load.n_decode}D")
        for margin in MARGINS:
            table.add_row(margin.name, *_cells(next(results).records))
    Console().print(table)


def _scenario(load: OverloadCase, margin: Margin) -> Scenario:
    described = scenario(load, "lookahead")
    scheduling = msgspec.structs.replace(
        described.scheduling,
        admission_quantile=margin.quantile,
        ttft_slo_s=margin.share * TTFT_SLO_S,
        tbt_slo_s=margin.share * TBT_SLO_S,
    )
    return msgspec.structs.replace(described, scheduling=scheduling)


def _cells(records: Sequence[SimRequestRecord]) -> tuple[str, ...]:
    admitted = [record for record in records if record.outcome not in ("rejected", "wasted")]
    late = [record for record in admitted if not record.meets(TTFT_SLO_S, None)]
    slow = [record for record in admitted if record.intervals.mean_s > TBT_SLO_S]
    n_good = len(admitted) - sum(
        not record.meets(TTFT_SLO_S, None) or record.intervals.mean_s > TBT_SLO_S
        for record in admitted
    )
    return (
        f"{len(records) - len(admitted):,}",
        f"{n_good:,}",
        f"{n_good / max(1, len(admitted)):.1%}",
        f"{len(late):,}",
        f"{len(slow):,}",
        f"{sum(record.n_out <= MIN_INTERVALS for record in slow):,}",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
