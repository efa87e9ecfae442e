"""Define `halfmoon profile`: its flags. What it does is in `machine_profile`, imported on use."""

from pathlib import Path
from typing import Annotated

import typer


def profile(
    model: Annotated[str, typer.Option(envvar="MODEL", help="As for halfmoon up")] = "",
    out: Annotated[Path, typer.Option(help="Write the cost file here")] = Path("costs.json"),
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: one per core")] = 0,
    block_size: Annotated[int, typer.Option(min=16, max=512, help="Tokens per block")] = 64,
    pool_mib: Annotated[int, typer.Option(min=1, help="KV memory of a worker, MiB")] = 1024,
    kvstore_mib: Annotated[int, typer.Option(min=1, help="Memory of a kvstore, MiB")] = 1024,
) -> None:
    """Measure prefill, decode and transfers on this machine; write a cost file."""
    from halfmoon_cli.simulate.machine_profile import profile_machine

    profile_machine(
        model,
        out,
        threads=threads,
        block_size=block_size,
        device_kv_bytes=pool_mib << 20,
        host_kv_bytes=kvstore_mib << 20,
    )
