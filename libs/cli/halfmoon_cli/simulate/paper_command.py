"""`halfmoon paper`: a table or figure of Mooncake's papers, run again."""

from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from halfmoon_simulator.papers import PAPERS
from halfmoon_simulator.papers.experiment_runner import ExperimentRunner
from halfmoon_simulator.papers.paper_report import print_report, to_markdown
from halfmoon_simulator.workloads.traces import BadTrace
from halfmoon_simulator.workloads.workload_sources import find_traces

console = Console()


def paper(
    name: Annotated[str, typer.Argument(help="One of: " + ", ".join(PAPERS))],
    traces: Annotated[
        str, typer.Option(envvar="HALFMOON_TRACES", help="Folder with published traces")
    ] = "",
    requests: Annotated[
        int, typer.Option(min=0, help="Only the first so many of each trace; 0: all")
    ] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: all cores")] = 0,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the report here")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write it here, for a page")] = None,
) -> None:
    """Print ours beside the published values, the setup, and what differs."""
    if name not in PAPERS:
        console.print(f"[red]halfmoon:[/red] no paper {name!r}, there are: {', '.join(PAPERS)}")
        raise typer.Exit(2)
    for path in (json, markdown):
        if path is not None and not path.resolve().parent.is_dir():
            console.print(f"[red]halfmoon:[/red] {path}: there is no folder to write it into")
            raise typer.Exit(2)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        bench = ExperimentRunner(
            folder=traces or find_traces(),
            n_requests=requests or None,
            n_jobs=jobs or None,
            seed=seed,
            done=lambda n, total: bar.update(task, completed=n, total=total),
        )
        try:
            report = PAPERS[name](bench)
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
    print_report(report, console)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if markdown is not None:
        markdown.write_text(to_markdown(report))
