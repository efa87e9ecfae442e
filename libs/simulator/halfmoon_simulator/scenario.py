"""One run as a description, and many of them on all cores.

A scenario is data, so it can be sent to another process and gives the same result there.
"""

import gc
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import msgspec

from halfmoon_sandbox.parent_death import end_with
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_simulator.cluster.cluster_sim import BadScenario, ClusterSim, WorkerFault
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.colocated.colocated_baseline import ColocatedSim, ColocatedSpec
from halfmoon_simulator.costs.cost_file import CostFile
from halfmoon_simulator.results.run_results import Progress, RunResult
from halfmoon_simulator.workloads.workload_sources import WorkloadSpec, make_workload


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A workload on a cluster."""

    label: str
    workload: WorkloadSpec
    costs: CostFile
    cluster: ClusterSpec | ColocatedSpec
    #: How the conductor decides, with its SLOs; for coupled instances only the SLOs count.
    scheduling: SchedulingConfig
    faults: tuple[WorkerFault, ...] = ()


def run_scenario(scenario: Scenario, progress: Progress | None = None) -> RunResult:
    """Run one scenario in this process."""
    requests = make_workload(scenario.workload).requests
    world: ClusterSim | ColocatedSim
    if isinstance(scenario.cluster, ColocatedSpec):
        if scenario.faults:
            raise BadScenario("faults are of disaggregated clusters; coupled instances have none")
        world = ColocatedSim(
            scenario.cluster,
            scenario.costs,
            requests,
            ttft_slo_s=scenario.scheduling.ttft_slo_s,
            tbt_slo_s=scenario.scheduling.tbt_slo_s,
        )
    else:
        world = ClusterSim(
            scenario.cluster,
            scenario.costs,
            scenario.scheduling,
            requests,
            faults=scenario.faults,
        )
    # Millions of small objects and next to no cycles: collecting them costs a tenth and more.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return world.run(progress)
    finally:
        if was_enabled:
            gc.enable()


def run_scenarios(
    scenarios: Sequence[Scenario],
    *,
    n_jobs: int | None = None,
    done: Callable[[int, int], None] = lambda n, total: None,
) -> list[RunResult]:
    """Run scenarios, each in a process of its own.

    Args:
        scenarios: any number.
        n_jobs: processes at a time; None: as many as there are cores.
        done: called with (scenarios over, scenarios in all) as they end.

    Returns:
        Results in the order of the scenarios, whatever ended first.
    """
    n_jobs = min(len(scenarios), n_jobs or len(os.sched_getaffinity(0)))
    results: dict[int, RunResult] = {}
    if n_jobs <= 1:
        for i, scenario in enumerate(scenarios):
            results[i] = run_scenario(scenario)
            done(len(results), len(scenarios))
    else:
        spawn = get_context("spawn")
        with ProcessPoolExecutor(n_jobs, spawn, end_with, (os.getpid(),)) as pool:
            futures = {
                pool.submit(run_scenario, scenario): i for i, scenario in enumerate(scenarios)
            }
            for future in as_completed(futures):
                results[futures[future]] = future.result()
                done(len(results), len(scenarios))
    return [results[i] for i in range(len(scenarios))]


def scheduling_for_simulation(costs: CostFile, **choices: object) -> SchedulingConfig:
    """Return the conductor's settings for a simulated cluster, with these choices.

    No worker is given up for being slow, since slowness is what is measured; paths are taken to
    be as fast as the cost file says until they have been seen.
    """
    base = SchedulingConfig(
        prior_bandwidth=costs.network_bytes_per_s,
        request_timeout_s=1e9,
        reserve_timeout_s=1e6,
        max_waiting=1_000_000,
        kept_decisions=0,
    )
    return msgspec.structs.replace(base, **choices)
