"""Define `halfmoon p2p`: copy a folder from one host to many, each a source for the next.

The commands; what they do is `halfmoon_transfer.p2p`, which is imported when one of them runs.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from halfmoon_cli.common.metadata_address import DEFAULT_METADATA, Metadata, open_metadata
from halfmoon_cli.common.stop_signals import catch_stop_signals

if TYPE_CHECKING:
    from halfmoon_transfer.p2p import GetReport, P2PStore

#: Seconds between two checks of a serving process whether its object was removed.
_LOOK_S = 2.0

app = typer.Typer(no_args_is_help=True, help="Move folders between hosts, each a source.")
console = Console()

Name = Annotated[str, typer.Argument(help="The object's name")]
Bind = Annotated[str, typer.Option(help="Address to serve peers at")]
Advertise = Annotated[
    str, typer.Option(help="Host or host:port that peers shall dial, if not what is bound")
]
Seconds = Annotated[float, typer.Option(min=0, help="Serve so long; 0: until Ctrl-C")]


@app.command()
def put(
    name: Name,
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="What to offer")],
    metadata: Metadata = DEFAULT_METADATA,
    bind: Bind = "127.0.0.1",
    advertise: Advertise = "",
    replace: Annotated[bool, typer.Option(help="Take the place of another object")] = False,
    for_seconds: Seconds = 0,
) -> None:
    """Offer a folder and serve it in the foreground, until Ctrl-C or until it is removed."""
    from halfmoon_transfer.p2p.folder_objects import list_files, publish_folder

    with _explained(), _client(metadata, bind, advertise) as store:
        total = sum(path.stat().st_size for path in list_files(folder))
        with _bar("checksums", total) as advance:
            record = publish_folder(store, name, folder, replace=replace, progress=advance)
        n_files = len(record.sizes)
        console.print(
            f"offering {escape(name)}: {n_files} files, {decimal(total)}", highlight=False
        )
        _serve(store, name, for_seconds)


@app.command()
def get(
    name: Name,
    folder: Annotated[Path, typer.Argument(help="Where it shall be; must not exist yet")],
    metadata: Metadata = DEFAULT_METADATA,
    bind: Bind = "127.0.0.1",
    advertise: Advertise = "",
    serve: Annotated[bool, typer.Option(help="Go on serving it to others")] = False,
    for_seconds: Seconds = 0,
) -> None:
    """Fetch a folder, serving meanwhile what is here already; all of it arrives or nothing."""
    from halfmoon_transfer.p2p.folder_objects import get_folder

    with _explained(), _client(metadata, bind, advertise) as store:
        with _bar(name, store.lookup(name).n_bytes) as advance:
            report = get_folder(store, name, folder, progress=advance)
        _tell(report, folder)
        if serve:
            _serve(store, name, for_seconds)


@app.command("ls")
def list_objects(
    metadata: Metadata = DEFAULT_METADATA,
    prefix: Annotated[str, typer.Argument(help="Only names that begin so")] = "",
) -> None:
    """List the objects, and the number of their holders."""
    from halfmoon_transfer.p2p import object_record as records
    from halfmoon_transfer.p2p.object_catalog import ObjectCatalog

    with _explained(), open_metadata(metadata) as store:
        table = Table("name", "files", "size", "publishers", "replicas", "in part", box=None)
        for record in ObjectCatalog(store).list(prefix):
            each = records.summarize(record)
            counts = (each.n_gold, each.n_replicas, each.n_partial)
            size = decimal(each.n_bytes)
            table.add_row(escape(each.name), str(each.n_buffers), size, *map(str, counts))
        console.print(table)


@app.command()
def rm(name: Name, metadata: Metadata = DEFAULT_METADATA) -> None:
    """Remove an object's record: no further host gets it, and its sources end."""
    from halfmoon_transfer.p2p.object_catalog import ObjectCatalog

    with _explained(), open_metadata(metadata) as store:
        if not ObjectCatalog(store).remove(name):
            _give_up(f"there is no object {name}")
        console.print(f"removed {escape(name)}", highlight=False)


@contextmanager
def _client(url: str, bind: str, advertise: str) -> "Iterator[P2PStore]":
    from halfmoon_transfer import (
        ClusterKey,
        TransferEngine,
        TransferSettings,
        encryption_from_environment,
    )
    from halfmoon_transfer.p2p import P2PStore

    name = f"p2p-{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"
    with ExitStack() as stack:
        metadata = stack.enter_context(open_metadata(url))
        engine = TransferEngine.open(
            name,
            metadata=metadata,
            bind=bind,
            advertise=advertise or None,
            backends=("tcp",),
            settings=TransferSettings(
                cluster_key=ClusterKey.from_environment(), encryption=encryption_from_environment()
            ),
        )
        stack.enter_context(engine)
        yield stack.enter_context(P2PStore(engine, metadata))


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(escape(title), total=total)
        yield lambda n_bytes: progress.advance(task, n_bytes)


def _tell(report: "GetReport", folder: Path) -> None:
    rate = decimal(int(report.n_bytes / max(report.seconds, 1e-9)))
    console.print(
        f"{escape(str(folder))}: {decimal(report.n_bytes)} in {report.seconds:.1f} s ({rate}/s), "
        f"from {len(report.bytes_from)} sources, checksums right",
        highlight=False,
    )


def _serve(store: "P2PStore", name: str, seconds: float) -> None:
    """Serve until Ctrl-C, SIGTERM, the end of the time, or the removal of the object."""
    from halfmoon_metadata import MetadataError

    until = time.monotonic() + seconds if seconds else float("inf")
    with catch_stop_signals() as ended:
        while not ended.wait(min(_LOOK_S, max(0.0, until - time.monotonic()))):
            if time.monotonic() >= until:
                return
            with contextlib.suppress(MetadataError):
                if not store.serving(name):
                    console.print(f"{escape(name)} was removed", highlight=False)
                    return


@contextmanager
def _explained() -> Iterator[None]:
    """Print errors in one line and exit with 2; let Ctrl-C end a transfer."""
    from halfmoon_metadata import MetadataError
    from halfmoon_transfer import TransferError

    try:
        yield
    except (TransferError, MetadataError, OSError, ValueError) as error:
        _give_up(str(error))
    except KeyboardInterrupt:
        _give_up("interrupted; nothing was left behind")


def _give_up(message: str) -> None:
    console.print(f"[red]halfmoon:[/red] {escape(message)}", highlight=False)
    raise typer.Exit(2)
