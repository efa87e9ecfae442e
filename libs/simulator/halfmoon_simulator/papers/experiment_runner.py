"""Run the papers' experiments: find the traces, start the processes, show the progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfmoon_simulator.results.run_results import RunResult
from halfmoon_simulator.scenario import Scenario, run_scenarios
from halfmoon_simulator.workloads.workload_sources import (
    DescribedWorkload,
    WorkloadSpec,
    make_workload,
)

#: The published limits of the evaluations: seconds.
TTFT_SLO_S = 30.0
TBT_SLO_S = 0.1


@dataclass(frozen=True)
class ExperimentRunner:
    """The options of a run of experiments."""

    #: Folder with published traces; "" when there is none.
    folder: str = ""
    #: The first so many requests of each trace; None: all. For a quick look.
    n_requests: int | None = None
    #: Processes at a time; None: as many as cores.
    n_jobs: int | None = None
    seed: int = 0
    done: Callable[[int, int], None] = lambda n, total: None

    def trace(self, source: str, *, speedup: float = 1.0) -> WorkloadSpec:
        """Return a published trace by name, or its stand-in."""
        return WorkloadSpec(
            source=source,
            folder=self.folder,
            n_requests=self.n_requests,
            speedup=speedup,
            seed=self.seed,
        )

    def load(self, source: str) -> DescribedWorkload:
        """Return the requests of a workload, and its description."""
        return make_workload(self.trace(source))

    def run(self, scenarios: Sequence[Scenario]) -> list[RunResult]:
        """Run all scenarios, on all cores."""
        return run_scenarios(scenarios, n_jobs=self.n_jobs, done=self.done)

    @property
    def cut_short(self) -> tuple[str, ...]:
        """A line for the setup when not all requests are run."""
        if self.n_requests is None:
            return ()
        return (f"CUT SHORT: only the first {self.n_requests} requests of each trace",)
