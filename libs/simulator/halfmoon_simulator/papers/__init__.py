"""The tables and figures of Mooncake's papers, each as one function of a `ExperimentRunner`."""

from collections.abc import Callable

from halfmoon_simulator.papers.bandwidth import bandwidth
from halfmoon_simulator.papers.cache_policies import cache_policies
from halfmoon_simulator.papers.capacity import capacity
from halfmoon_simulator.papers.experiment_runner import ExperimentRunner
from halfmoon_simulator.papers.goodput import goodput
from halfmoon_simulator.papers.hybrid import hybrid
from halfmoon_simulator.papers.long_context import long_context
from halfmoon_simulator.papers.overload import overload
from halfmoon_simulator.papers.paper_report import PaperReport
from halfmoon_simulator.papers.ratio import ratio
from halfmoon_simulator.papers.scheduling import scheduling

PAPERS: dict[str, Callable[[ExperimentRunner], PaperReport]] = {
    "cache-policies": cache_policies,
    "capacity": capacity,
    "scheduling": scheduling,
    "overload": overload,
    "goodput": goodput,
    "long-context": long_context,
    "bandwidth": bandwidth,
    "ratio": ratio,
    "hybrid": hybrid,
}
