"""Try a placement policy of one's own in the simulator: `python examples/placement_policy.py`.

Requests go to the worker whose own kvstore holds the longest prefix; among equals, to the
shortest queue. `MinTtft` decides which prefix a worker uses, and explains the choices.
"""

from collections.abc import Sequence

from halfmoon_scheduling.placement.estimates import Estimate, PlacementRequest
from halfmoon_scheduling.placement.modes.least_ttft import MinTtft
from halfmoon_scheduling.placement.placement_mode import PLACEMENT_MODES, Choice, TtftSlo
from halfmoon_simulator import (
    ClusterSpec,
    Scenario,
    WorkloadSpec,
    load_costs,
    run_scenario,
    scheduling_for_simulation,
)


@PLACEMENT_MODES.register
class LongestPrefix(MinTtft):
    """Prefer the worker with the longest prefix in its own kvstore."""

    name = "longest_prefix"
    summary = "the longest prefix in the worker's own kvstore"

    def choose(self, job: PlacementRequest, rows: Sequence[Estimate], slo: TtftSlo) -> Choice:
        """Return the best row."""
        return Choice(min(rows, key=lambda row: (-row.local_blocks, row.queue_s, row.worker_id)))


costs, cluster = load_costs("llama2-70b-a800x8"), ClusterSpec(n_prefill=4, n_decode=4)
load = WorkloadSpec(source="hot-prefixes", n_requests=300)
for mode in ("load_balance", "min_ttft", "longest_prefix"):
    how = scheduling_for_simulation(costs, placement=mode)
    run = Scenario(label=mode, workload=load, costs=costs, cluster=cluster, scheduling=how)
    print(f"{mode}: TTFT p90 {run_scenario(run).summary().ttft_s.p90:.2f} s")
