"""Compare learnt with hand-set margins on the papers' overloads, in simulated time.

    python -m benchmarks.overload.simulated FOLDER

The paper's experiment gives the conductor tighter limits than those by which a request is good.
Here `lookahead` is run with these, with the true limits, and with these and learnt errors.
FOLDER has the published traces.
"""

import sys
from dataclasses import replace

import msgspec
from rich.console import Console
from rich.table import Table

from halfmoon_simulator.papers.experiment_runner import TTFT_SLO_S, ExperimentRunner
from halfmoon_simulator.papers.overload import (
    TBT_SLO_S,
    OverloadCase,
    OverloadResult,
    overload_cases,
    scenario,
)

#: Names, and the quantile of errors; the first is given the tighter limits.
MARGINS = (("set by hand", 0.0), ("none", 0.0), ("learnt", 0.9))


def main(folder: str) -> None:
    """Run all loads with all margins and print the table."""
    bench = ExperimentRunner(folder=folder)
    table = Table(title="refused / good / share of the admitted", box=None)
    for column in ("load", *(name for name, _ in MARGINS)):
        table.add_column(column, justify="right")
    for load in overload_cases(bench):
        cells = [_cell(bench, load, i, quantile) for i, (_, quantile) in enumerate(MARGINS)]
        table.add_row(f"{load.name}, {load.n_prefill}P+{load.n_decode}D", *cells)
    Console().print(table)


def _cell(bench: ExperimentRunner, load: OverloadCase, i: int, quantile: float) -> str:
    if i:
        load = replace(load, kept_ttft_s=TTFT_SLO_S, kept_tbt_s=TBT_SLO_S)
    described = scenario(load, "lookahead")
    scheduling = msgspec.structs.replace(described.scheduling, admission_quantile=quantile)
    [result] = bench.run([msgspec.structs.replace(described, scheduling=scheduling)])
    one = OverloadResult.of(result, load)
    share = one.n_good / max(1, one.n_requests - one.n_refused)
    return f"{one.n_refused:,} / {one.n_good:,} / {share:.1%}"


if __name__ == "__main__":
    main(*sys.argv[1:])
