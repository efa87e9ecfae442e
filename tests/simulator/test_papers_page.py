"""The page of the papers is the output of their commands, section by section."""

from pathlib import Path

from halfmoon_simulator.papers import PAPERS
from halfmoon_simulator.papers.paper_report import PaperCheck, PaperReport, PaperTable
from halfmoon_simulator.papers.papers_page import split_page, update_page

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"


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
