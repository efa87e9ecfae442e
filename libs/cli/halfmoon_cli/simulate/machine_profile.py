"""Measure this machine and write a cost file for the simulator, for `halfmoon profile`.

The engine runs in a process of its own, the only one that loads torch. The transfer library runs
in this process. Both measurements are fitted and written in the simulator's format.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halfmoon_cli.common.demo_model import DemoModelMissing, demo_model_folder
from halfmoon_cli.transfer.bandwidth_bench import TransferLoad, run_bandwidth_bench
from halfmoon_engine.checkpoints.model_folder import check_model
from halfmoon_engine.profile import REFUSED
from halfmoon_metadata.whole_file import replace_file
from halfmoon_models.errors import ModelError
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import DecodeCost, PrefillCost
from halfmoon_scheduling.prediction.cost_model import unscaled_prefill_s, unscaled_step_s
from halfmoon_simulator.costs.cost_file import CostFile, dump_costs
from halfmoon_simulator.costs.cost_fit import fit_decode, fit_prefill, largest_relative_error

console = Console()

#: Bytes of one transfer, for the measurement of bandwidth.
SIZES = (64 * 1024, 1024 * 1024, 8 * 1024 * 1024)
#: A control message between two processes of one host, there or back: half the round trip that
#: `python -m benchmarks reservation` measures.
MESSAGE_S = 0.00025
#: A formula that misses a measurement by more than this share makes a simulation doubtful.
LARGEST_MISFIT = 0.3


class ProfileFailed(Exception):
    """The engine's process failed; the text is the end of its output."""


class _Points(msgspec.Struct):
    """Measurements that the engine's process prints."""

    name: str
    layout: KvLayout
    max_context: int
    prefill: list[dict[str, float]]
    decode: list[dict[str, float]]


class Bandwidth(NamedTuple):
    """Bytes per second by one path and size."""

    backend: str
    n_bytes: int
    bytes_per_s: float


def profile_machine(
    model: str,
    out: Path,
    *,
    threads: int,
    block_size: int,
    device_kv_bytes: int,
    host_kv_bytes: int,
) -> None:
    """Measure, fit, write the cost file, and print what was found.

    Args:
        model: folder or hub id; empty: the demo model.
        out: the cost file.
        threads: of the engine; 0: one per core.
        block_size: tokens of a block.
        device_kv_bytes: KV memory of a worker.
        host_kv_bytes: memory of a kvstore.

    Raises:
        typer.Exit: the model can't be served, or it could not be measured.
    """
    try:
        model = model or str(demo_model_folder())
        check_model(model)
        with console.status("timing forward passes …"):
            points = measure_engine(model, block_size=block_size, threads=threads)
        with console.status("timing transfers …"):
            paths = measure_transfers()
    except (DemoModelMissing, ProfileFailed, ModelError) as error:
        console.print("[red]halfmoon:[/red]", escape(str(error)), highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    costs = cost_file(points, paths, threads, device_kv_bytes, host_kv_bytes)
    replace_file(out, dump_costs(costs).encode(), new_mode=0o666)
    misfits = {
        "prefill": _worst_prefill(costs.prefill, points),
        "decode step": _worst_decode(costs.decode, points),
    }
    _show(costs, misfits, paths)
    for warning in fit_warnings(misfits):
        console.print("[yellow]halfmoon:[/yellow]", warning, highlight=False, soft_wrap=True)
    console.print(f"wrote {out}: halfmoon simulate --costs {out}", highlight=False)


def measure_engine(model: str, *, block_size: int, threads: int) -> _Points:
    """Time the engine in a process of its own.

    Raises:
        ProfileFailed: it did not end well, or printed something else.
    """
    command = [sys.executable, "-m", "halfmoon_engine.profile", model]
    command += ["--block-size", str(block_size), "--threads", str(threads)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode == REFUSED:
        raise ProfileFailed(ran.stderr.strip().rpartition("\n")[2])
    last = "\n".join((ran.stdout + ran.stderr).splitlines()[-12:])
    if ran.returncode:
        raise ProfileFailed(f"the engine could not be profiled:\n{last}")
    try:
        return msgspec.json.decode(ran.stdout.splitlines()[-1], type=_Points)
    except (IndexError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProfileFailed(f"no profile in what the engine said ({error}):\n{last}") from None


def measure_transfers() -> list[Bandwidth]:
    """Measure bandwidth between two processes of this host, by size, over TCP and shared memory."""
    found: list[Bandwidth] = []
    for backend in ("tcp", "shm"):
        for size in SIZES:
            load = TransferLoad(
                backend=backend,
                block_bytes=min(size, 64 * 1024),
                batch=max(1, size // (64 * 1024)),
                seconds=1.0,
            )
            found.append(Bandwidth(backend, size, run_bandwidth_bench(load).gb_per_s * 1e9))
    return found


def cost_file(
    points: _Points,
    paths: list[Bandwidth],
    threads: int,
    device_kv_bytes: int,
    host_kv_bytes: int,
) -> CostFile:
    """Fit the measurements and return a cost file."""
    prefill = fit_prefill(
        [(int(p["n_tokens"]), int(p["n_cached"]), p["seconds"]) for p in points.prefill]
    )
    decode = fit_decode(
        [(int(p["n_requests"]), int(p["context_tokens"]), p["seconds"]) for p in points.decode]
    )
    layout = points.layout
    return CostFile(
        name=points.name,
        source=(
            f"halfmoon profile on this machine: {threads or 'all'} threads,"
            f" {len(points.prefill)} prefill and {len(points.decode)} decode shapes",
            "pass_s: all of c0, since a prompt's shapes were timed in one pass each",
            "bandwidths: 8 MiB transfers between two processes of this host, by TCP (network) and"
            " shared memory (local)",
        ),
        prefill=prefill,
        pass_s=prefill.c0_s,
        decode=decode,
        n_layers=layout.n_layers,
        n_kv_heads=layout.n_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        max_context=points.max_context,
        device_kv_bytes=device_kv_bytes,
        host_kv_bytes=host_kv_bytes,
        network_bytes_per_s=_bandwidth(paths, "tcp"),
        local_bytes_per_s=_bandwidth(paths, "shm"),
        message_s=MESSAGE_S,
    )


def fit_warnings(misfits: dict[str, float]) -> list[str]:
    """Return a warning for each formula that is too far from a measurement.

    Args:
        misfits: the worst relative error of each formula, by what it predicts.
    """
    return [
        f"the fit is bad: the {what} formula misses a measurement by {misfit:.0%}, and"
        f" {LARGEST_MISFIT:.0%} is the limit. Simulated times can be as wrong: end other programs"
        " and run halfmoon profile again, or give --threads the cores that a worker has"
        for what, misfit in misfits.items()
        if not misfit <= LARGEST_MISFIT
    ]


def _bandwidth(paths: list[Bandwidth], backend: str) -> float:
    return max(path.bytes_per_s for path in paths if path.backend == backend)


def _show(costs: CostFile, misfits: dict[str, float], paths: list[Bandwidth]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("what", "formula", "worst misfit"):
        table.add_column(column)
    for what, cost in (("prefill", costs.prefill), ("decode step", costs.decode)):
        table.add_row(what, _terms(cost), f"{misfits[what]:.0%}")
    for path in paths:
        speed = f"{path.bytes_per_s / 1e9:.2f} GB/s"
        table.add_row(f"{path.backend}, {path.n_bytes // 1024} KiB", speed, "")
    console.print(table)


def _terms(cost: Any) -> str:
    return "  ".join(
        f"{f.removesuffix('_s')} {getattr(cost, f):.3g} s" for f in cost.__struct_fields__
    )


def _worst_prefill(cost: PrefillCost, points: _Points) -> float:
    return largest_relative_error(
        (unscaled_prefill_s(cost, int(p["n_tokens"]), int(p["n_cached"])), p["seconds"])
        for p in points.prefill
    )


def _worst_decode(cost: DecodeCost, points: _Points) -> float:
    return largest_relative_error(
        (unscaled_step_s(cost, int(p["n_requests"]), int(p["context_tokens"])), p["seconds"])
        for p in points.decode
    )
