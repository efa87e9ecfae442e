"""`halfmoon simulate`: a workload on a cluster that is not there."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from halfmoon_metadata.whole_file import replace_file
from halfmoon_scheduling.admission_modes import ADMISSION_MODES
from halfmoon_scheduling.cache.eviction_policies import EVICTION_POLICIES
from halfmoon_scheduling.placement.modes import PLACEMENT_MODES
from halfmoon_scheduling.prefill.queue_order import QUEUE_ORDERS
from halfmoon_simulator.costs.cost_file import BadCosts, load_costs, profile_names

if TYPE_CHECKING:
    from halfmoon_simulator.cluster.cluster_sim import WorkerFault
    from halfmoon_simulator.results.run_results import RunResult
    from halfmoon_simulator.scenario import Scenario
    from halfmoon_simulator.sweep import Axis

console = Console()

#: Decisions that a simulated conductor keeps when each request's record is to explain its own: all
#: that one event can lead to.
KEPT_DECISIONS = 4096

#: Said after every run, as its figures look like measurements.
LIMITS = (
    "simulated, not measured: slow workers, lost messages, disk errors and other programs on the"
    " machine are not modelled (halfmoon simulate --help)"
)

Source = Annotated[
    str,
    typer.Argument(
        help="A trace in the published JSONL format; or conversation, synthetic, toolagent, arxiv;"
        " or a data set: l-eval, arxiv-summarization, simulated-16k to -128k;"
        " or chat-and-documents, hot-prefixes, swinging"
    ),
]


def simulate(
    source: Source = "conversation",
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers")] = 8,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers")] = 8,
    group_size: Annotated[
        int, typer.Option(min=1, help="Prefill workers that share long prompts in stages")
    ] = 1,
    local_prefill: Annotated[
        int, typer.Option(min=0, help="Uncached tokens that decode workers prefill in a step")
    ] = 0,
    coupled: Annotated[
        int, typer.Option(min=0, help="Instead: so many instances that do both, as vLLM does")
    ] = 0,
    prefix_caching: Annotated[bool, typer.Option(help="Of coupled instances")] = False,
    chunked: Annotated[
        int, typer.Option(min=0, help="Token budget of coupled chunked prefill; 0: whole prompts")
    ] = 0,
    costs: Annotated[
        str, typer.Option(help="A cost file, or one of: " + ", ".join(profile_names()))
    ] = "llama3-70b-a800x8",
    placement: Annotated[
        str,
        typer.Option(help=f"How prefill workers are chosen: {PLACEMENT_MODES.names}"),
    ] = "kvcache_centric",
    queue_order: Annotated[
        str,
        typer.Option(
            help=f"Which request of equal priority is prefilled first: {QUEUE_ORDERS.names}"
        ),
    ] = "arrival",
    admission: Annotated[
        str, typer.Option(help=f"Which requests are admitted: {ADMISSION_MODES.names}")
    ] = "none",
    ttft_slo: Annotated[float, typer.Option(min=0, help="Seconds; 0: no limit")] = 30.0,
    tbt_slo: Annotated[float, typer.Option(min=0, help="Seconds; 0: no limit")] = 0.1,
    replication_bytes_per_s: Annotated[
        float, typer.Option(min=0, help="Copy hot prefixes ahead of requests; 0: never")
    ] = 0.0,
    disk_bytes: Annotated[
        float, typer.Option(min=0, help="Disk below each kvstore's memory; 0: none")
    ] = 0.0,
    disk_bytes_per_s: Annotated[
        float, typer.Option(help="Bandwidth that the disk's reads and writes share")
    ] = 6e9,
    disk_latency_s: Annotated[
        float, typer.Option(min=0, help="Seconds until a read or write of the disk begins")
    ] = 1e-4,
    role_changes: Annotated[
        bool, typer.Option(help="Let workers change between prefill and decode")
    ] = False,
    speedup: Annotated[
        float, typer.Option(help="Arrivals, and turns, so many times as fast")
    ] = 1.0,
    rate: Annotated[float, typer.Option(help="Requests per second of a data set")] = 1.0,
    requests: Annotated[int, typer.Option(min=0, help="The first so many; 0: all")] = 0,
    spread: Annotated[
        bool, typer.Option(help="Spread requests of one time stamp up to the next stamp")
    ] = False,
    traces: Annotated[
        str, typer.Option(envvar="HALFMOON_TRACES", help="Folder with published traces")
    ] = "",
    seed: Annotated[int, typer.Option(help="Of everything that is drawn")] = 0,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE,VALUE,… of an option above, or of any field of workload,"
            " scheduling, cluster or costs; may be repeated: --sweep placement=random,min_ttft"
            " --sweep threshold=1,1.5,2 --sweep speedup=1,2,3"
        ),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="WORKER@SECONDS or WORKER@SECONDS+BACK: lost then, and started again"),
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes of a sweep; 0: all cores")] = 0,
    policy: Annotated[
        str,
        typer.Option(
            help="Instead: how often these eviction policies hit in one pool of six sizes, names"
            f" separated by commas, or all: {EVICTION_POLICIES.names}"
        ),
    ] = "",
    json: Annotated[Path | None, typer.Option(help="Write summaries and timelines here")] = None,
    with_requests: Annotated[
        bool, typer.Option(help="And every request, with the reason for its placement")
    ] = False,
    plots: Annotated[Path | None, typer.Option(help="Write PNG pictures into this folder")] = None,
) -> None:
    """Run the scheduling core on a workload, with modelled engines and wires.

    Engines take the time that the cost file's formulas say, and transfers the bytes over a share
    of the bandwidth. Not modelled: slow workers, lost messages, disk errors, other programs on the
    machine, the queue of a live worker's blocks, and pages kept at decode. Workers report their
    load every 0.5 s (live: 0.1 s). docs/simulator.md has the whole list.
    """
    from concurrent.futures.process import BrokenProcessPool

    from halfmoon_cli.simulate.hit_rate_table import print_hit_rates
    from halfmoon_simulator.cluster.cluster_sim import BadScenario
    from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
    from halfmoon_simulator.colocated.colocated_baseline import ColocatedSpec
    from halfmoon_simulator.results.run_report import NamedSummary, print_summaries
    from halfmoon_simulator.scenario import Scenario, scheduling_for_simulation
    from halfmoon_simulator.sweep import BadSweep, expand_axes, parse_axis
    from halfmoon_simulator.workloads.traces import BadTrace
    from halfmoon_simulator.workloads.workload_sources import (
        WorkloadSpec,
        find_traces,
        make_workload,
    )

    try:
        workload = WorkloadSpec(
            source=source,
            folder=traces or find_traces(),
            n_requests=requests or None,
            speedup=speedup,
            rate_per_s=rate,
            spread=spread,
            seed=seed,
        )
        if policy:
            print_hit_rates(make_workload(workload), policy, console)
            return
        cost_file = load_costs(costs)
        scheduling = scheduling_for_simulation(
            cost_file,
            placement=placement,
            admission=admission,
            seed=seed,
            ttft_slo_s=ttft_slo or None,
            tbt_slo_s=tbt_slo or None,
            replication_bytes_per_s=replication_bytes_per_s,
            role_changes=role_changes,
            kept_decisions=KEPT_DECISIONS if with_requests else 0,
        )
        cluster: ClusterSpec | ColocatedSpec = ClusterSpec(
            n_prefill=prefill,
            n_decode=decode,
            group_size=group_size,
            local_prefill_tokens=local_prefill,
            queue_order=queue_order,
            disk_bytes=disk_bytes,
            disk_bytes_per_s=disk_bytes_per_s,
            disk_latency_s=disk_latency_s,
        )
        label = f"{prefill}P+{decode}D {placement}"
        if group_size > 1:
            label += f", groups of {group_size}"
        if local_prefill:
            label += f", local up to {local_prefill}"
        if queue_order != "arrival":
            label += f", by {queue_order}"
        if disk_bytes:
            label += f", disks of {disk_bytes / 1e9:,.0f} GB"
        if admission != "none":
            label += f", {admission}"
        if coupled:
            label = f"{coupled} coupled"
            cluster = ColocatedSpec(
                n_instances=coupled,
                prefix_caching=prefix_caching,
                chunk_tokens=chunked or None,
            )
        base = Scenario(
            label=label,
            workload=workload,
            costs=cost_file,
            cluster=cluster,
            scheduling=scheduling,
            faults=tuple(_fault(text) for text in fault or ()),
        )
        _check_folders(json, plots)
        axes = [parse_axis(text) for text in sweep or ()]
        scenarios = expand_axes(base, axes)
        _describe(base)
        results = _run(scenarios, jobs or None)
    except (BadTrace, BadCosts, BadSweep, BadScenario, ValueError, OSError) as error:
        _give_up(str(error))
    except BrokenProcessPool:
        _give_up("a process of the sweep died, perhaps for want of memory; try --jobs 1")
    runs = [(scenario.label, result) for scenario, result in zip(scenarios, results, strict=True)]
    print_summaries([NamedSummary(name, result.summary()) for name, result in runs], console)
    _write(runs, axes, json, plots, with_requests=with_requests)
    console.print(LIMITS, highlight=False, soft_wrap=True)


def _describe(base: "Scenario") -> None:
    from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
    from halfmoon_simulator.workloads.traces import trace_statistics
    from halfmoon_simulator.workloads.workload_sources import make_workload

    made = make_workload(base.workload)
    facts = trace_statistics(made.requests)
    console.print(
        f"{made.description}: {facts.n_requests:,} requests in {facts.duration_s:,.0f} s,"
        f" {facts.mean_input:,.0f} tokens in and {facts.mean_output:,.0f} out on average,"
        f" {facts.reuse:.3f} of the blocks seen before; costs {base.costs.name}",
        highlight=False,
    )
    if isinstance(base.cluster, ClusterSpec):
        mode = PLACEMENT_MODES[base.scheduling.placement]
        console.print(f"placement {mode.name}: {mode.summary}", highlight=False)


def _run(scenarios: list["Scenario"], n_jobs: int | None) -> list["RunResult"]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from halfmoon_simulator.scenario import run_scenario, run_scenarios

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        if len(scenarios) > 1:
            task = bar.add_task("scenarios", total=len(scenarios))
            return run_scenarios(
                scenarios, n_jobs=n_jobs, done=lambda n, _: bar.update(task, completed=n)
            )
        task = bar.add_task("requests", total=None)

        def show(at_s: float, n_over: int, n: int) -> None:
            bar.update(task, completed=n_over, total=n, description=f"{at_s:,.0f} s simulated")

        return [run_scenario(scenarios[0], show)]


def _write(
    runs: list[tuple[str, "RunResult"]],
    axes: list["Axis"],
    json: Path | None,
    plots: Path | None,
    *,
    with_requests: bool,
) -> None:
    if json is not None:
        from halfmoon_simulator.results.run_report import results_to_json

        text = results_to_json(runs, with_requests=with_requests)
        replace_file(json, text.encode(), new_mode=0o666)
        console.print(f"wrote {json}", highlight=False)
    if plots is not None:
        from halfmoon_simulator.results.plots import save_plots
        from halfmoon_simulator.sweep import varies_rate

        for path in save_plots(runs, plots, over_rates=varies_rate(axes)):
            console.print(f"wrote {path}", highlight=False)


def _check_folders(json: Path | None, plots: Path | None) -> None:
    """Before the work is done whose results they are for."""
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
    if json is not None and not json.resolve().parent.is_dir():
        raise FileNotFoundError(f"--json {json}: there is no folder {json.resolve().parent}")


def _fault(text: str) -> "WorkerFault":
    from halfmoon_simulator.cluster.cluster_sim import BadScenario, WorkerFault

    worker, at, times = text.partition("@")
    lost, plus, back = times.partition("+")
    try:
        if not (worker and at):
            raise ValueError
        return WorkerFault(float(lost), worker, float(back) if plus else None)
    except ValueError:
        raise BadScenario(
            f"--fault {text!r} is not of the form WORKER@SECONDS or WORKER@SECONDS+BACK"
        ) from None


def _give_up(message: str) -> NoReturn:
    console.print(f"[red]halfmoon:[/red] {message}", highlight=False)
    raise typer.Exit(2)
