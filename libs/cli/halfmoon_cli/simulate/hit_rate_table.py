"""Print the hit rates of eviction policies, for `halfmoon simulate --policy`."""

from rich.console import Console
from rich.live import Live
from rich.table import Table

from halfmoon_scheduling.cache.eviction_policies import EVICTION_POLICIES, open_eviction_policy
from halfmoon_simulator.hit_rates import CAPACITIES, hit_rate
from halfmoon_simulator.workloads.workload_sources import DescribedWorkload


def print_hit_rates(workload: DescribedWorkload, names: str, console: Console) -> None:
    """Print a row per policy and a column per capacity; rows appear as they are done.

    Args:
        workload: its requests, one after the other, without a clock.
        names: of policies, separated by commas; or "all".
        console: to print to.

    Raises:
        ValueError: no such policy.
    """
    chosen = (
        list(EVICTION_POLICIES) if names == "all" else [name.strip() for name in names.split(",")]
    )
    for name in chosen:
        open_eviction_policy(name)
    table = Table(title=f"Share of block references that hit: {workload.description}")
    table.add_column("blocks that fit")
    for capacity in CAPACITIES:
        table.add_column("all" if capacity is None else f"{capacity:,}", justify="right")
    with Live(table, console=console, auto_refresh=False) as live:
        for name in chosen:
            rates = (hit_rate(workload.requests, open_eviction_policy(name), c) for c in CAPACITIES)
            table.add_row(name, *(f"{rate:.4f}" for rate in rates))
            live.refresh()
