"""Print a paper's comparison: our figures beside theirs, the setup, and the differences."""

from textwrap import wrap

import msgspec
from rich.console import Console
from rich.table import Table


class PaperTable(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of text under columns of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class PaperCheck(msgspec.Struct, frozen=True):
    """A statement that must hold: an order, a direction."""

    sentence: str
    holds: bool


class PaperReport(msgspec.Struct, frozen=True, kw_only=True):
    """One paper's table, run again."""

    name: str
    title: str
    #: Where the published values are from.
    published_in: str
    setup: tuple[str, ...]
    tables: tuple[PaperTable, ...]
    checks: tuple[PaperCheck, ...] = ()
    #: Why ours and theirs differ, a sentence each.
    differences: tuple[str, ...] = ()
    #: The outcome in one line, of figures of this run alone; "": the checks are counted.
    summary: str = ""


def print_report(report: PaperReport, console: Console) -> None:
    """For a terminal."""
    console.print(f"[bold]{report.title}[/bold]  ({report.published_in})", highlight=False)
    for line in report.setup:
        console.print(f"  {line}", highlight=False)
    for table in report.tables:
        shown = Table(title=table.title, title_justify="left", box=None, pad_edge=False)
        for i, column in enumerate(table.columns):
            shown.add_column(column, justify="left" if i == 0 else "right")
        for row in table.rows:
            shown.add_row(*row)
        console.print()
        console.print(shown)
    if report.checks:
        console.print()
    for check in report.checks:
        mark = "[green]holds[/green]" if check.holds else "[red]FAILS[/red]"
        console.print(f"  {mark}  {check.sentence}", highlight=False)
    if report.differences:
        console.print("\nWhat differs:")
    for line in report.differences:
        console.print(f"  · {line}", highlight=False)


def to_markdown(report: PaperReport) -> str:
    """For a page of documentation."""
    lines = [f"## {report.name}: {report.title}", ""]
    lines += [*wrap_markdown(f"Published: {report.published_in}."), ""]
    for line in report.setup:
        lines += wrap_markdown(line, "- ")
    for table in report.tables:
        lines += [
            "",
            *wrap_markdown(f"{table.title}:"),
            "",
            "| " + " | ".join(table.columns) + " |",
        ]
        lines += ["|" + "---|" * len(table.columns)]
        lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    if report.checks:
        lines += [""]
    for check in report.checks:
        mark = "holds" if check.holds else "**does not hold**"
        lines += wrap_markdown(f"{mark}: {check.sentence}", "- ")
    if report.differences:
        lines += ["", "Why they differ:", ""]
    for line in report.differences:
        lines += wrap_markdown(line, "- ")
    return "\n".join(lines) + "\n"


def wrap_markdown(text: str, bullet: str = "") -> list[str]:
    """Return a paragraph, or an item of a list, in lines of at most 100 characters."""
    return wrap(
        bullet + text,
        100,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )
