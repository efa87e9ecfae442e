"""Define `halfmoon transfer`: `topology`, `bench` and `target`.

The transfer library is imported when a command runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from halfmoon_cli.common.metadata_address import (
    DEFAULT_METADATA,
    METADATA_HELP,
    METADATA_VARIABLE,
    Metadata,
    metadata_or_default,
    open_metadata,
)
from halfmoon_cli.common.stop_signals import catch_stop_signals

console = Console()
app = typer.Typer(no_args_is_help=True, help="Look at the ways that bytes can take.")

#: Name of a target that is given none.
_TARGET = "bench-target"
Backend = Annotated[str, typer.Option(help="Path to take: tcp, shm, …")]
Bind = Annotated[str, typer.Option(help="Address to listen at, IPv4 or IPv6")]
Advertise = Annotated[
    str, typer.Option(help="Host or host:port that the other side dials, if not what is bound")
]


@app.callback()
def transfer() -> None:
    """Look at the ways that bytes can take."""


@app.command()
def topology(
    json: Annotated[
        bool, typer.Option("--json", help="Print the matrix only, as it can be read again")
    ] = False,
    matrix: Annotated[
        Path | None,
        typer.Option(help="File with a NIC priority matrix, in place of what is found out"),
    ] = None,
) -> None:
    """Show this machine's network cards and GPUs, and which are near which memory."""
    from halfmoon_cli.transfer.topology_table import show_topology

    try:
        show_topology(console, as_json=json, matrix=matrix)
    except (OSError, ValueError) as error:
        text = f"the matrix in {matrix} can't be used: {error}"
        console.print("[red]halfmoon:[/red]", escape(text), highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


@app.command()
def bench(
    backend: Backend = "tcp",
    op: Annotated[Literal["read", "write"], typer.Option(help="Direction")] = "write",
    block_size: Annotated[int, typer.Option(min=1, help="Bytes of one block")] = 64 * 1024,
    batch: Annotated[int, typer.Option(min=1, help="Blocks in one transfer")] = 128,
    threads: Annotated[int, typer.Option(min=1, help="Transfers that go on at once")] = 1,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure")] = 3.0,
    checksums: Annotated[bool, typer.Option(help="Check what crosses a wire")] = True,
    verify: Annotated[bool, typer.Option(help="Compare copies in memory, too")] = False,
    metadata: Annotated[str, typer.Option(help=f"{METADATA_HELP}; for a target elsewhere")] = "",
    target: Annotated[
        str, typer.Option(help=f"The target's name there; without --metadata: {METADATA_VARIABLE}")
    ] = "",
    bind: Bind = "127.0.0.1",
    advertise: Advertise = "",
) -> None:
    """Measure how fast blocks move to or from a target: one that it starts, or one elsewhere."""
    from halfmoon_cli.transfer.bandwidth_bench import (
        TransferLoad,
        run_bandwidth_bench,
        run_bandwidth_bench_against,
    )

    load = TransferLoad(
        backend=backend,
        op=op,
        block_bytes=block_size,
        batch=batch,
        threads=threads,
        seconds=seconds,
        checksums=checksums,
        verify=verify,
    )
    is_elsewhere = bool(metadata or target)
    with _explained():
        if is_elsewhere:
            with open_metadata(metadata_or_default(metadata)) as store:
                found = run_bandwidth_bench_against(
                    load, store, target or _TARGET, bind=bind, advertise=advertise
                )
        else:
            found = run_bandwidth_bench(load)
    sides = "this side" if is_elsewhere else "both sides"
    console.print(
        f"{found.gb_per_s:.2f} GB/s   p50 {found.p50_us:.0f} µs   p99 {found.p99_us:.0f} µs   "
        f"{found.cpu_s_per_gb:.2f} CPU seconds per GB ({sides})",
        highlight=False,
    )


@app.command()
def target(
    metadata: Metadata = DEFAULT_METADATA,
    name: Annotated[str, typer.Option(help="What `bench` finds it by")] = _TARGET,
    backend: Backend = "tcp",
    size_mib: Annotated[int, typer.Option(min=1, help="Memory for blocks, in MiB")] = 256,
    bind: Bind = "127.0.0.1",
    advertise: Advertise = "",
    for_seconds: Annotated[float, typer.Option(min=0, help="0: until Ctrl-C")] = 0.0,
) -> None:
    """Be what `halfmoon transfer bench` on another host moves blocks to and from."""
    from halfmoon_cli.transfer.bandwidth_target import serve_target

    with (
        catch_stop_signals() as ended,
        _explained(),
        open_metadata(metadata) as store,
        serve_target(
            store,
            name,
            backend=backend,
            n_bytes=size_mib * 1024 * 1024,
            bind=bind,
            advertise=advertise,
        ) as engine,
    ):
        where = ", ".join(each.address for each in engine.descriptor.endpoints.values())
        console.print(f"target {escape(name)} at {escape(where)}", highlight=False)
        ended.wait(for_seconds or None)


@contextmanager
def _explained() -> Iterator[None]:
    """Print errors in one line, and exit with 2."""
    from halfmoon_metadata import MetadataError
    from halfmoon_transfer import TransferError

    try:
        yield
    except (TransferError, MetadataError, ValueError, OSError) as error:
        console.print(f"[red]halfmoon:[/red] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None
