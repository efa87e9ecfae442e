"""Requests served in time, disaggregated against coupled: both papers' headline figures."""

from collections.abc import Mapping, Sequence
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
#: of these, or at none. Then speeds are halved until two runs with and without enough are so near.
FASTER = (3.5, 4.0, 4.5, 5.0, 6.0, 8.0)
SLOWER = (0.75, 0.5, 0.25, 0.1)
NEAR = 1.1
#: The second one's limits on TBT, and published gains in requests within the limits.
TBT_LIMITS_S = (0.1, 0.2, 0.3)
PUBLISHED_GAINS = {"conversation": (498, 157, 59), "synthetic": (62, 40, 28)}
GAIN_SPEEDS = (1.0, 1.5)
#: Tokens of a pass in chunks by vLLM's default for a server on an A100, where prefix caching is on.
VLLM_CHUNK_TOKENS = 2048


@dataclass(frozen=True)
class ComparedSystem:
    """One of those compared."""

    name: str
    cluster: ClusterSpec | ColocatedSpec


def goodput(bench: ExperimentRunner) -> PaperReport:
    """[10P+10D] against [20M], and 16 nodes against three kinds of coupled ones."""
    first, first_checks, first_outcome = _against_20(bench)
    second, second_checks, second_outcome = _gains(bench)
    sources = ("arxiv", "conversation", "synthetic")
    return PaperReport(
        name="goodput",
        summary=f"{first_outcome}; {second_outcome}",
        title="Requests within the limits, disaggregated against coupled",
        published_in="arXiv 2407.00079, section 8.2; FAST'25, effective request capacity",
        setup=(
            *bench.cut_short,
            *(f"{source}: {bench.load(source).description}" for source in sources),
            f"TTFT within {TTFT_SLO_S:g} s, TBT within {TBT_SLO_S:g} s where nothing else is said;"
            " a request's TBT is the mean of its longest tenth of intervals; no request is"
            " rejected",
            "coupled instances (M) are behind a balancer by number of requests. They batch as vLLM"
            " did when the papers were written: prompts whole, before the next step",
            "vLLM's default: what it does today for a server on an A100. A pass has"
            f" {VLLM_CHUNK_TOKENS:,} tokens, one of each running request and chunks of prompts;"
            " with prefix caching. Chunks of 512: smaller passes, no prefix caching",
        ),
        tables=(*first, *second),
        checks=(*first_checks, *second_checks),
        differences=(
            "The gain depends on how loaded the coupled instances are, which the papers do not"
            " state: at low load both are in time, at high load neither is.",
            "Our coupled instances are idealised: no scheduling overhead between passes, perfect"
            " balance of counts, the same prefill and decode times as disaggregated ones.",
            "By Figure 14 of the FAST'25 paper decode has much to spare at 0.1 s per token. So"
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


def _against_20(bench: ExperimentRunner) -> tuple[list[PaperTable], list[PaperCheck], str]:
    costs = load_costs("llama2-70b-a800x8")
    systems = (
        ComparedSystem("10P+10D", ClusterSpec(n_prefill=10, n_decode=10)),
        ComparedSystem("14P+6D", ClusterSpec(n_prefill=14, n_decode=6)),
        ComparedSystem("20M", ColocatedSpec(n_instances=20)),
        ComparedSystem(
            "20M, vLLM's default",
            ColocatedSpec(n_instances=20, chunk_tokens=VLLM_CHUNK_TOKENS, prefix_caching=True),
        ),
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
    rows.append(("published", "~100% / ~100% / ~100%", "", "~100% / 57% / ", ""))
    _bracket(bench, costs, systems, shares)
    served = {name: capacity(values) for name, values in shares.items()}
    coupled = served["20M"]
    second = [
        (
            system.name,
            served[system.name].enough_run(shares[system.name]),
            served[system.name].too_fast_run(shares[system.name]),
            gain(served[system.name], coupled) if system.name != "20M" else "",
            "+75%" if system.name == "10P+10D" else "",
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
                title=f"Fastest run with {ENOUGH:.0%} of the requests within both limits, and the"
                " next one",
                columns=("system", "enough at", "too few at", "gain over 20M", "published"),
                rows=tuple(second),
            ),
        ],
        [
            PaperCheck(
                "arXiv trace, at its own speed: nearly all requests of 10P+10D are within both"
                " limits, and many of 20M miss the TBT",
                shares["10P+10D"][1.0] > 0.97 and shares["20M"][1.0] < 0.9,
            ),
            *(
                PaperCheck(
                    f"arXiv trace: 10P+10D serves more requests within both limits than {peer}",
                    (served["10P+10D"].enough or 0.0) > (served[peer].enough or 0.0),
                )
                for peer in ("20M", "20M, vLLM's default")
            ),
        ],
        "arXiv with enough in time: "
        + ", ".join(f"{row[0].removeprefix('20M, ')} {row[1]}" for row in second),
    )


def _bracket(
    bench: ExperimentRunner,
    costs: CostFile,
    systems: Sequence[ComparedSystem],
    shares: dict[str, dict[float, float]],
) -> None:
    """Run further speeds of each system until two near ones enclose what it can serve."""
    while True:
        wanted = [
            (system, speed)
            for system in systems
            if (speed := next_speed(shares[system.name])) is not None
        ]
        if not wanted:
            return
        results = bench.run([_scenario(bench, costs, "arxiv", v, each) for each, v in wanted])
        for (system, speed), result in zip(wanted, results, strict=True):
            shares[system.name][speed] = _share(result, TTFT_SLO_S, TBT_SLO_S)


def next_speed(shares: Mapping[float, float]) -> float | None:
    """Return the speed to run next; None: two near ones enclose, or no further one is tried.

    Args:
        shares: by speed that was run, of the requests that were in time.
    """
    found = capacity(shares)
    if found.too_fast is None:
        return next((speed for speed in FASTER if speed not in shares), None)
    if found.enough is None:
        return next((speed for speed in SLOWER if speed not in shares), None)
    if found.too_fast <= NEAR * found.enough:
        return None
    return round((found.enough + found.too_fast) / 2, 3)


@dataclass(frozen=True)
class GoodputCapacity:
    """The runs between which enough requests cease to be in time."""

    #: The last speed with enough and the first one without; None: there was none.
    enough: float | None
    too_fast: float | None

    def enough_run(self, shares: Mapping[float, float]) -> str:
        """Return the fastest run with enough, and its share."""
        return _run(self.enough, shares, "none of the runs")

    def too_fast_run(self, shares: Mapping[float, float]) -> str:
        """Return the slowest run without enough, and its share."""
        return _run(self.too_fast, shares, "not reached: the sweep ends")


def _run(speed: float | None, shares: Mapping[float, float], none: str) -> str:
    return none if speed is None else f"{speed:.4g}× ({shares[speed]:.0%})"


def capacity(shares: Mapping[float, float]) -> GoodputCapacity:
    """Return the runs between which the share falls below `ENOUGH`.

    Args:
        shares: by speed, of the requests that were in time.
    """
    speeds = sorted(shares)
    too_fast = next((speed for speed in speeds if shares[speed] < ENOUGH), None)
    slower = [speed for speed in speeds if too_fast is None or speed < too_fast]
    return GoodputCapacity(slower[-1] if slower else None, too_fast)


def gain(ours: GoodputCapacity, theirs: GoodputCapacity) -> str:
    """Return by how much more one can serve, as what the runs of both leave open."""
    low = ours.enough / theirs.too_fast - 1 if ours.enough and theirs.too_fast else None
    high = ours.too_fast / theirs.enough - 1 if ours.too_fast and theirs.enough else None
    if low is None:
        return "unknown" if high is None else f"at most {high:+.0%}"
    return f"at least {low:+.0%}" if high is None else f"{low:+.0%} to {high:+.0%}"


def _gains(bench: ExperimentRunner) -> tuple[list[PaperTable], list[PaperCheck], str]:
    costs = load_costs("llama3-70b-a800x8")
    systems = (
        ComparedSystem("8P+8D", ClusterSpec(n_prefill=8, n_decode=8)),
        ComparedSystem("16M", ColocatedSpec(n_instances=16)),
        ComparedSystem("16M, prefix caching", ColocatedSpec(n_instances=16, prefix_caching=True)),
        ComparedSystem("16M, chunks of 512", ColocatedSpec(n_instances=16, chunk_tokens=512)),
        ComparedSystem(
            "16M, vLLM's default",
            ColocatedSpec(n_instances=16, chunk_tokens=VLLM_CHUNK_TOKENS, prefix_caching=True),
        ),
    )
    tables, checks, outcomes = [], [], []
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
            over = [" / ".join(_gain_over(ours, values)) for values in (shares[1], shares[-1])]
            outcomes.append(f"{'' if i else f'{source} '}{speed:g}× {', '.join(over)}")
            for system, values in zip(systems, shares, strict=True):
                cells = [f"{value:.0%}" for value in values]
                if system is not systems[0]:
                    cells = [
                        f"{theirs:.0%} ({more})" if theirs else "0%"
                        for theirs, more in zip(values, _gain_over(ours, values), strict=True)
                    ]
                rows.append((f"{speed:g}× {system.name}", *cells))
            checks.append(
                PaperCheck(
                    f"{source} at {speed:g}×: 8P+8D serves more than 16M at 100 ms, and the gain"
                    " shrinks as the limit grows",
                    ours[0] > shares[1][0] and _shrinks(ours, shares[1]),
                )
            )
        outcomes[-1] += f" (published {' / '.join(f'{gain:+d}%' for gain in published)})"
        rows.append(("published gain", *(f"{gain:+d}%" for gain in published)))
        tables.append(
            PaperTable(
                title=f"{source} trace: share within both limits (gain of 8P+8D over it)",
                columns=("speed, system", *(f"TBT {limit * 1e3:.0f} ms" for limit in TBT_LIMITS_S)),
                rows=tuple(rows),
            )
        )
    limits = " / ".join(f"{limit * 1e3:.0f}" for limit in TBT_LIMITS_S)
    outcome = f"gains over 16M, and over vLLM's default, at {limits} ms: {'; '.join(outcomes)}"
    return tables, checks, outcome


def _gain_over(ours: Sequence[float], theirs: Sequence[float]) -> list[str]:
    return [f"{a / b - 1:+.0%}" if b else "∞" for a, b in zip(ours, theirs, strict=True)]


def _shrinks(ours: list[float], theirs: list[float]) -> bool:
    gains = [a / b for a, b in zip(ours, theirs, strict=True) if b]
    return all(before >= after for before, after in pairwise(gains))
