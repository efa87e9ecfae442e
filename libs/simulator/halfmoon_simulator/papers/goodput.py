"""Requests served in time, disaggregated against coupled: both papers' headline figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.colocated.colocated_baseline import ColocatedSpec
from halfmoon_simulator.costs.cost_file import CostFile, load_costs
from halfmoon_simulator.papers.experiment_runner import TBT_SLO_S, TTFT_SLO_S, ExperimentRunner
from halfmoon_simulator.papers.paper_report import PaperCheck, PaperReport, PaperTable
from halfmoon_simulator.results.run_results import RunResult
from halfmoon_simulator.scenario import Scenario, scheduling_for_simulation

#: Replay speeds of the first experiment, and the share of requests that must be in time.
SPEEDS = (1.0, 1.5, 2.0, 2.5, 3.0)
ENOUGH = 0.9
#: Further speeds, in the order in which they are tried, for a system that has enough in time at all
#: of these, or at none: its figure is to be between two runs.
FASTER = (3.5, 4.0, 4.5, 5.0, 6.0, 8.0)
SLOWER = (0.75, 0.5, 0.25, 0.1)
#: The second one's limits on TBT, and published gains in requests within the limits.
TBT_LIMITS_S = (0.1, 0.2, 0.3)
PUBLISHED_GAINS = {"conversation": (498, 157, 59), "synthetic": (62, 40, 28)}
GAIN_SPEEDS = (1.0, 1.5)


@dataclass(frozen=True)
class ComparedSystem:
    """One of those compared."""

    name: str
    cluster: ClusterSpec | ColocatedSpec


def goodput(bench: ExperimentRunner) -> PaperReport:
    """[10P+10D] against [20M], and 16 nodes against three kinds of coupled ones."""
    first, first_checks = _against_20(bench)
    second, second_checks = _gains(bench)
    sources = ("arxiv", "conversation", "synthetic")
    return PaperReport(
        name="goodput",
        title="Requests within the limits, disaggregated against coupled",
        published_in="arXiv 2407.00079, section 8.2; FAST'25, effective request capacity",
        setup=(
            *bench.cut_short,
            *(f"{source}: {bench.load(source).description}" for source in sources),
            f"TTFT within {TTFT_SLO_S:g} s, TBT within {TBT_SLO_S:g} s where nothing else is said;"
            " a request's TBT is the mean of its longest tenth of intervals; no rejections",
            "coupled instances batch as vLLM does, behind a balancer by number of requests",
        ),
        tables=(*first, *second),
        checks=(*first_checks, *second_checks),
        differences=(
            "The gain depends on how loaded the coupled instances are, which the papers do not"
            " state: at low load both are in time, at high load neither is.",
            "Our coupled instances are idealised: no scheduling overhead between passes, perfect"
            " balance of counts, the same prefill and decode times as disaggregated ones.",
            "By Figure 14 of the FAST'25 paper decode has much to spare at 0.1 s per token, so"
            " 10P+10D is short of prefill long before it is short of decode: with as many nodes,"
            " fewer of them for decode do better (see ratio).",
        ),
    )


def _scenario(
    bench: ExperimentRunner, costs: CostFile, source: str, speed: float, system: ComparedSystem
) -> Scenario:
    return Scenario(
        label=f"{system.name} {source} @ {speed}",
        workload=bench.trace(source, speedup=speed),
        costs=costs,
        cluster=system.cluster,
        scheduling=scheduling_for_simulation(costs, ttft_slo_s=TTFT_SLO_S, tbt_slo_s=TBT_SLO_S),
    )


def _share(result: RunResult, ttft_slo_s: float | None, tbt_slo_s: float | None) -> float:
    return sum(r.meets(ttft_slo_s, tbt_slo_s) for r in result.records) / len(result.records)


def _against_20(bench: ExperimentRunner) -> tuple[list[PaperTable], list[PaperCheck]]:
    costs = load_costs("llama2-70b-a800x8")
    systems = (
        ComparedSystem("10P+10D", ClusterSpec(n_prefill=10, n_decode=10)),
        ComparedSystem("14P+6D", ClusterSpec(n_prefill=14, n_decode=6)),
        ComparedSystem("20M", ColocatedSpec(n_instances=20)),
    )
    scenarios = [_scenario(bench, costs, "arxiv", s, sys) for s in SPEEDS for sys in systems]
    results = bench.run(scenarios)
    rows = []
    shares: dict[str, dict[float, float]] = {system.name: {} for system in systems}
    for i, speed in enumerate(SPEEDS):
        row = [f"{speed:g}×"]
        for j, system in enumerate(systems):
            result = results[i * len(systems) + j]
            both = _share(result, TTFT_SLO_S, TBT_SLO_S)
            shares[system.name][speed] = both
            ttft, tbt = _share(result, TTFT_SLO_S, None), _share(result, None, TBT_SLO_S)
            row.append(f"{ttft:.0%} / {tbt:.0%} / {both:.0%}")
        rows.append(tuple(row))
    rows.append(("published", "~100% / ~100% / ~100%", "", "~100% / 57% / "))
    for system in systems:
        _bracket(bench, costs, system, shares[system.name])
    served = {name: capacity(values) for name, values in shares.items()}
    least = served["20M"].speed
    second = [
        (
            system.name,
            str(served[system.name]),
            f"{served[system.name].speed / least - 1:+.0%}" if system.name != "20M" else "",
            "+75%" if system.name == "10P+10D" else "",
            served[system.name].between,
        )
        for system in systems
    ]
    return (
        [
            PaperTable(
                title="arXiv trace: share within TTFT / TBT / both",
                columns=("speed", *(system.name for system in systems)),
                rows=tuple(rows),
            ),
            PaperTable(
                title=f"Speed at which {ENOUGH:.0%} of the requests are within both limits",
                columns=("system", "speed", "gain over 20M", "published", "between the runs at"),
                rows=tuple(second),
            ),
        ],
        [
            PaperCheck(
                "arXiv trace, at its own speed: nearly all requests of 10P+10D are within both"
                " limits, and many of 20M miss the TBT",
                shares["10P+10D"][1.0] > 0.97 and shares["20M"][1.0] < 0.9,
            ),
            PaperCheck(
                "arXiv trace: 10P+10D serves more requests within both limits than 20M",
                served["10P+10D"].speed > served["20M"].speed,
            ),
        ],
    )


def _bracket(
    bench: ExperimentRunner, costs: CostFile, system: ComparedSystem, shares: dict[float, float]
) -> None:
    """Run further speeds until enough requests are in time at one, and not at the next."""
    further = FASTER if all(each >= ENOUGH for each in shares.values()) else SLOWER
    wanted = further is FASTER
    for speed in further:
        if any((each >= ENOUGH) is not wanted for each in shares.values()):
            return
        [result] = bench.run([_scenario(bench, costs, "arxiv", speed, system)])
        shares[speed] = _share(result, TTFT_SLO_S, TBT_SLO_S)


@dataclass(frozen=True)
class GoodputCapacity:
    """The speed up to which enough requests are in time, and the runs that it lies between."""

    speed: float
    #: The last run with enough and the first one without; None: there was none.
    enough: float | None
    too_fast: float | None

    def __str__(self) -> str:
        bound = "≥ " if self.too_fast is None else "< " if self.enough is None else ""
        return f"{bound}{self.speed:.2f}×"

    @property
    def between(self) -> str:
        """The runs' speeds."""
        return " and ".join(f"{each:g}×" for each in (self.enough, self.too_fast) if each)


def capacity(shares: Mapping[float, float]) -> GoodputCapacity:
    """Interpolate where the share falls below `ENOUGH` between two runs, or return a bound.

    Args:
        shares: by speed, of the requests that were in time.
    """
    speeds = sorted(shares)
    too_fast = next((speed for speed in speeds if shares[speed] < ENOUGH), None)
    if too_fast is None:
        return GoodputCapacity(speeds[-1], speeds[-1], None)
    if too_fast == speeds[0]:
        return GoodputCapacity(too_fast, None, too_fast)
    enough = speeds[speeds.index(too_fast) - 1]
    part = (shares[enough] - ENOUGH) / (shares[enough] - shares[too_fast])
    return GoodputCapacity(enough + part * (too_fast - enough), enough, too_fast)


def _gains(bench: ExperimentRunner) -> tuple[list[PaperTable], list[PaperCheck]]:
    costs = load_costs("llama3-70b-a800x8")
    systems = (
        ComparedSystem("8P+8D", ClusterSpec(n_prefill=8, n_decode=8)),
        ComparedSystem("16M", ColocatedSpec(n_instances=16)),
        ComparedSystem("16M, prefix caching", ColocatedSpec(n_instances=16, prefix_caching=True)),
        ComparedSystem("16M, chunks of 512", ColocatedSpec(n_instances=16, chunk_tokens=512)),
    )
    tables, checks = [], []
    for source, published in PUBLISHED_GAINS.items():
        scenarios = [
            _scenario(bench, costs, source, s, system) for s in GAIN_SPEEDS for system in systems
        ]
        results = bench.run(scenarios)
        rows = []
        for i, speed in enumerate(GAIN_SPEEDS):
            part = results[i * len(systems) : (i + 1) * len(systems)]
            shares = [[_share(result, TTFT_SLO_S, tbt) for tbt in TBT_LIMITS_S] for result in part]
            ours = shares[0]
            for system, values in zip(systems, shares, strict=True):
                cells = [f"{value:.0%}" for value in values]
                if system is not systems[0]:
                    cells = [
                        f"{theirs:.0%} ({mine / theirs - 1:+.0%})" if theirs else "0%"
                        for mine, theirs in zip(ours, values, strict=True)
                    ]
                rows.append((f"{speed:g}× {system.name}", *cells))
            checks.append(
                PaperCheck(
                    f"{source} at {speed:g}×: 8P+8D serves more than 16M at 100 ms, and the gain"
                    " shrinks as the limit grows",
                    ours[0] > shares[1][0] and _shrinks(ours, shares[1]),
                )
            )
        rows.append(("published gain", *(f"{gain:+d}%" for gain in published)))
        tables.append(
            PaperTable(
                title=f"{source} trace: share within both limits (gain of 8P+8D over it)",
                columns=("speed, system", *(f"TBT {limit * 1e3:.0f} ms" for limit in TBT_LIMITS_S)),
                rows=tuple(rows),
            )
        )
    return tables, checks


def _shrinks(ours: list[float], theirs: list[float]) -> bool:
    gains = [a / b for a, b in zip(ours, theirs, strict=True) if b]
    return all(before >= after for before, after in pairwise(gains))
