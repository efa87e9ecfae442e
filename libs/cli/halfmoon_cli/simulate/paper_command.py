"""`halfmoon paper`: a table or figure of Mooncake's papers, run again."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from halfmoon_simulator.papers import PAPERS, open_paper

if TYPE_CHECKING:
    from halfmoon_simulator.papers.experiment_runner import ExperimentRunner
    from halfmoon_simulator.papers.paper_report import PaperReport

console = Console()

#: In place of a name: each paper in turn.
ALL = "all"
NAMES = (*PAPERS, ALL)


def paper(
    name: Annotated[
        str,
        typer.Argument(help=f"One of: {', '.join(NAMES)}; without it: list them"),
    ] = "",
    traces: Annotated[
        str, typer.Option(envvar="HALFMOON_TRACES", help="Folder with published traces")
    ] = "",
    requests: Annotated[
        int, typer.Option(min=0, help="Only the first so many of each trace; 0: all")
    ] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: all cores")] = 0,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the report here; a list, if all")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write it here, for a page")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Replace its section and row in this page of all papers")
    ] = None,
) -> None:
    """Print ours beside the published values, the setup, and what differs."""
    if not name:
        console.print("halfmoon paper NAME, which is one of:", *NAMES, sep="\n  ", highlight=False)
        raise typer.Exit(2)
    if name not in NAMES:
        console.print(f"[red]halfmoon:[/red] no paper {name!r}, there are: {', '.join(NAMES)}")
        raise typer.Exit(2)
    import msgspec

    from halfmoon_simulator.papers.experiment_runner import ExperimentRunner
    from halfmoon_simulator.papers.paper_report import print_report, to_markdown
    from halfmoon_simulator.papers.papers_page import update_page
    from halfmoon_simulator.workloads.workload_sources import find_traces

    for path in (json, markdown, page):
        if path is not None and not path.resolve().parent.is_dir():
            console.print(f"[red]halfmoon:[/red] {path}: there is no folder to write it into")
            raise typer.Exit(2)
    options = ExperimentRunner(
        folder=traces or find_traces(),
        n_requests=requests or None,
        n_jobs=jobs or None,
        seed=seed,
    )
    n_cores = jobs or len(os.sched_getaffinity(0))
    reports = []
    for each in PAPERS if name == ALL else (name,):
        began_s = time.monotonic()
        report = _run(each, options)
        seconds = time.monotonic() - began_s
        reports.append(report)
        print_report(report, console)
        if page is not None:
            before = page.read_text() if page.exists() else ""
            now = update_page(before, report, PAPERS, seconds=seconds, n_cores=n_cores)
            page.write_text(now)
    if json is not None:
        written = msgspec.json.encode(reports if name == ALL else reports[0])
        json.write_bytes(msgspec.json.format(written, indent=1) + b"\n")
    if markdown is not None:
        markdown.write_text("\n".join(to_markdown(report) for report in reports))


def _run(name: str, options: "ExperimentRunner") -> "PaperReport":
    """Run one paper with a bar of its progress, or say what is wrong and exit."""
    from concurrent.futures.process import BrokenProcessPool
    from dataclasses import replace

    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from halfmoon_simulator.workloads.traces import BadTrace

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        runner = replace(options, done=lambda n, total: bar.update(task, completed=n, total=total))
        try:
            return open_paper(name)(runner)
        except (BadTrace, OSError) as error:
            bar.stop()
            console.print(f"[red]halfmoon:[/red] {error}", highlight=False)
            raise typer.Exit(2) from None
        except BrokenProcessPool:
            bar.stop()
            console.print(
                "[red]halfmoon:[/red] a process died, perhaps for want of memory; try --jobs 1"
            )
            raise typer.Exit(2) from None
