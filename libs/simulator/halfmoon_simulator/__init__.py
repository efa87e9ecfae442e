"""Run the scheduling core on an hour of traffic in seconds, with modelled engines and networks.

The names below are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfmoon_simulator.cluster.cluster_sim import WorkerFault
    from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
    from halfmoon_simulator.colocated.colocated_baseline import ColocatedSpec
    from halfmoon_simulator.costs.cost_file import CostFile, load_costs
    from halfmoon_simulator.results.plots import save_plots
    from halfmoon_simulator.results.run_results import RunResult, RunSummary
    from halfmoon_simulator.scenario import (
        Scenario,
        run_scenario,
        run_scenarios,
        scheduling_for_simulation,
    )
    from halfmoon_simulator.workloads.traces import TraceRequest, read_trace
    from halfmoon_simulator.workloads.workload_sources import (
        WorkloadSpec,
        find_traces,
        make_workload,
    )

__all__ = [
    "ClusterSpec",
    "ColocatedSpec",
    "CostFile",
    "RunResult",
    "RunSummary",
    "Scenario",
    "TraceRequest",
    "WorkerFault",
    "WorkloadSpec",
    "find_traces",
    "load_costs",
    "make_workload",
    "read_trace",
    "run_scenario",
    "run_scenarios",
    "save_plots",
    "scheduling_for_simulation",
]

#: Module of each public name, below this package.
_MODULES = {
    "ClusterSpec": "cluster.cluster_spec",
    "ColocatedSpec": "colocated.colocated_baseline",
    "CostFile": "costs.cost_file",
    "RunResult": "results.run_results",
    "RunSummary": "results.run_results",
    "Scenario": "scenario",
    "TraceRequest": "workloads.traces",
    "WorkerFault": "cluster.cluster_sim",
    "WorkloadSpec": "workloads.workload_sources",
    "find_traces": "workloads.workload_sources",
    "load_costs": "costs.cost_file",
    "make_workload": "workloads.workload_sources",
    "read_trace": "workloads.traces",
    "run_scenario": "scenario",
    "run_scenarios": "scenario",
    "save_plots": "results.plots",
    "scheduling_for_simulation": "scenario",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
