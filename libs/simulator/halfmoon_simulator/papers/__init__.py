"""The tables and figures of Mooncake's papers, each as one function of a `Bench`."""

from collections.abc import Callable

from halfmoon_simulator.papers.bench import Bench
from halfmoon_simulator.papers.cache_policies import cache_policies
from halfmoon_simulator.papers.capacity import capacity
from halfmoon_simulator.papers.paper_report import PaperReport

PAPERS: dict[str, Callable[[Bench], PaperReport]] = {
    "cache-policies": cache_policies,
    "capacity": capacity,
}
