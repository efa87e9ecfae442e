"""Simulate a trace under two placements and plot it: `python examples/simulate_trace.py FOLDER`.

Without the published trace of conversations in ./traces, its stand-in is simulated.
"""

import sys
from pathlib import Path

from halfmoon_simulator import (
    ClusterSpec,
    Scenario,
    WorkloadSpec,
    find_traces,
    load_costs,
    run_scenario,
    save_plots,
    scheduling_for_simulation,
)

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "plots")
folder.mkdir(parents=True, exist_ok=True)
costs = load_costs("llama2-70b-a800x8")
runs = []
for placement in ("load_balance", "kvcache_centric"):
    scenario = Scenario(
        label=placement,
        workload=WorkloadSpec(source="conversation", folder=find_traces(), n_requests=1000),
        costs=costs,
        cluster=ClusterSpec(n_prefill=4, n_decode=4),
        scheduling=scheduling_for_simulation(costs, placement=placement, ttft_slo_s=30.0),
    )
    result = run_scenario(scenario)
    print(f"{placement}: TTFT p90 {result.summary().ttft_s.p90:.2f} s")
    runs.append((placement, result))
for path in save_plots(runs, folder):
    print("wrote", path)
