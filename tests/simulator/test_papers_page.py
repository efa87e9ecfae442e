"""The page of the papers is the output of their commands, section by section."""

from pathlib import Path

import pytest

from halfmoon_simulator.papers import PAPERS
from halfmoon_simulator.papers.paper_report import PaperCheck, PaperReport, PaperTable
from halfmoon_simulator.papers.papers_page import split_page, update_page

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"
NAMES = ("first", "second", "third")


def a_report(name: str, *, summary: str = "", cell: str = "1") -> PaperReport:
    return PaperReport(
        name=name,
        title=f"The {name}",
        published_in="a paper",
        setup=("long words " * 30,),
        tables=(PaperTable(title="Rates", columns=("a", "b"), rows=(("x", cell),)),),
        checks=(PaperCheck("it grows", holds=True), PaperCheck("it shrinks", holds=False)),
        differences=("None.",),
        summary=summary,
    )


def a_page(*reports: PaperReport) -> str:
    page = ""
    for report in reports:
        page = update_page(page, report, NAMES, seconds=12.4, n_cores=2)
    return page


def test_the_page_has_a_section_and_a_row_for_each_command_and_is_as_a_command_leaves_it() -> None:
    page = PAGE.read_text()
    sections, rows = split_page(page)
    assert tuple(sections) == tuple(rows) == PAPERS
    name = PAPERS[0]
    once = update_page(page, a_report(name), PAPERS, seconds=1.0, n_cores=2)
    sections_then, rows_then = split_page(once)
    for parts in (sections, rows, sections_then, rows_then):
        del parts[name]
    assert (sections_then, rows_then) == (sections, rows)
    assert once.split("## ", 1)[0].split("|", 1)[0] == page.split("## ", 1)[0].split("|", 1)[0]


def test_a_command_replaces_its_own_section_and_row_alone() -> None:
    page = a_page(a_report("first"), a_report("second"), a_report("third"))
    again = update_page(
        page, a_report("second", summary="new", cell="77"), NAMES, seconds=3.0, n_cores=1
    )
    before, after = page.splitlines(), again.splitlines()
    removed = [line for line in before if line not in after]
    added = [line for line in after if line not in before]
    assert removed == ["| `second` | 1 of 2 checks hold | 12 s on 2 cores |"]
    assert added == ["| `second` | new | 3 s on 1 cores |", "| x | 77 |"]
    assert len(after) == len(before)


@pytest.mark.parametrize("order", [("third", "first", "second"), ("second", "third", "first")])
def test_the_page_does_not_depend_on_the_order_of_the_runs(order: tuple[str, ...]) -> None:
    assert a_page(*map(a_report, order)) == a_page(*map(a_report, NAMES))


def test_what_is_no_command_any_more_leaves_the_page() -> None:
    page = a_page(*map(a_report, NAMES))
    fewer = update_page(page, a_report("first"), NAMES[:2], seconds=1.0, n_cores=2)
    assert tuple(split_page(fewer)[0]) == tuple(split_page(fewer)[1]) == NAMES[:2]


def test_lines_of_text_are_no_longer_than_those_of_other_pages() -> None:
    page = a_page(a_report("first"))
    assert max(len(line) for line in page.splitlines() if not line.startswith("|")) <= 100
    assert "- long words" in page
    assert "\n  words" in page or "\n  long" in page
