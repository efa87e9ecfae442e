"""`halfmoon transfer bench`; the transfer library is imported when it runs."""

from typing import Annotated, Literal

import typer
from rich.console import Console

console = Console()


def bench(
    backend: Annotated[str, typer.Option(help="Path to take: tcp, shm, …")] = "tcp",
    op: Annotated[Literal["read", "write"], typer.Option(help="Direction")] = "write",
    block_size: Annotated[int, typer.Option(min=1, help="Bytes of one block")] = 64 * 1024,
    batch: Annotated[int, typer.Option(min=1, help="Blocks in one transfer")] = 128,
    threads: Annotated[int, typer.Option(min=1, help="Transfers that go on at once")] = 1,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure")] = 3.0,
    checksums: Annotated[bool, typer.Option(help="Check what crosses a wire")] = True,
) -> None:
    """Measure how fast blocks move between this process and a target that it starts."""
    from halfmoon_cli.transfer_bench import Load, run_bench
    from halfmoon_transfer import TransferError

    load = Load(
        backend=backend,
        op=op,
        block_bytes=block_size,
        batch=batch,
        threads=threads,
        seconds=seconds,
        checksums=checksums,
    )
    try:
        found = run_bench(load)
    except (TransferError, ValueError) as error:
        console.print(f"[red]halfmoon:[/red] {error}", highlight=False)
        raise typer.Exit(2) from None
    console.print(
        f"{found.gb_per_s:.2f} GB/s   p50 {found.p50_us:.0f} µs   p99 {found.p99_us:.0f} µs   "
        f"{found.cpu_s_per_gb:.2f} CPU seconds per GB (both sides)",
        highlight=False,
    )
