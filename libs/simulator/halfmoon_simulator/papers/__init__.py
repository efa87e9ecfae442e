"""The tables and figures of Mooncake's papers, each as one function of an `ExperimentRunner`.

Each is the function of its name in the module of its name, which is imported when it is opened: a
command lists the names without a simulator.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfmoon_simulator.papers.experiment_runner import ExperimentRunner
    from halfmoon_simulator.papers.paper_report import PaperReport

    Paper = Callable[[ExperimentRunner], PaperReport]

#: Their names, in the order of docs/papers.md.
PAPERS = (
    "cache-policies",
    "capacity",
    "scheduling",
    "overload",
    "goodput",
    "long-context",
    "bandwidth",
    "ratio",
    "hybrid",
)


def open_paper(name: str) -> "Paper":
    """Return the function of one of `PAPERS`."""
    function = name.replace("-", "_")
    paper: Paper = getattr(import_module(f"{__name__}.{function}"), function)
    return paper
