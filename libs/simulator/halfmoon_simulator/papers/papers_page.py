"""Keep a page of documentation that is the output of the papers' commands.

Each command replaces its own section and its own row of the table at the top. All else stays, so
that commands may be run one at a time.
"""

import re
from collections.abc import Sequence

from halfmoon_simulator.papers.paper_report import PaperReport, to_markdown, wrap_markdown

_TITLE = "# The papers' tables, run again"
_ABOVE = (
    "`halfmoon paper NAME` runs one of the tables or figures of Mooncake's papers (arXiv"
    " 2407.00079, and FAST'25: 'Trading More Storage for Less Computation') and prints ours beside"
    " theirs."
    " What is modelled and the one calibration are described in [simulator.md](simulator.md). The"
    " two published traces are the conversation and the synthetic one; the two others were not at"
    " hand, and each section says what stood in for them.",
    "This page is output: `halfmoon paper NAME --page docs/papers.md` replaces a command's section"
    " and its row below, and `halfmoon paper all --page docs/papers.md` all of them.",
    "In one line each, ours beside theirs:",
)
_HEAD = ("| command | outcome | duration |", "|---|---|---|")
_BELOW = (
    "Rates, numbers of nodes and workloads that the papers do not state are ours; the calibration"
    " is one and was not changed for any table of a paper. `hybrid` has the costs of Dynamo's"
    " simulator.",
    "Simulations run on all cores. A duration is that of the run shown, beside whatever else the"
    " machine did; no figure of a simulation depends on it.",
)
_ROW = re.compile(r"^\| `([a-z0-9-]+)` \|", re.MULTILINE)


def update_page(
    page: str, report: PaperReport, names: Sequence[str], *, seconds: float, n_cores: int
) -> str:
    """Return the page with this report in place of the command's section and row.

    Args:
        page: the page so far; "" when there is none.
        report: the output of one command.
        names: all commands, in the order of the page. What the page has of others is dropped.
        seconds: how long the run took.
        n_cores: cores that it ran on.
    """
    sections, rows = split_page(page)
    sections[report.name] = to_markdown(report).rstrip("\n")
    outcome = report.summary or _count_checks(report)
    rows[report.name] = f"| `{report.name}` | {outcome} | {seconds:.0f} s on {n_cores} cores |"
    lines = [_TITLE]
    for paragraph in _ABOVE:
        lines += ["", *wrap_markdown(paragraph)]
    lines += ["", *_HEAD, *(rows[name] for name in names if name in rows)]
    for paragraph in _BELOW:
        lines += ["", *wrap_markdown(paragraph)]
    for name in names:
        if name in sections:
            lines += ["", sections[name]]
    return "\n".join(lines) + "\n"


def split_page(page: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return a page's sections and rows by command, both in the order of the page."""
    above, *parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    sections = {part[3:].split(":", 1)[0].strip(): part.rstrip("\n") for part in parts}
    rows = {match[1]: above[match.start() :].split("\n", 1)[0] for match in _ROW.finditer(above)}
    return sections, rows


def _count_checks(report: PaperReport) -> str:
    n_holding = sum(check.holds for check in report.checks)
    return f"{n_holding} of {len(report.checks)} checks hold"
