"""Compare our engine with vLLM's in one run: `python -m benchmarks.engine`.

vLLM's CPU build is installed into an environment of its own, and models with random weights are
made, under ~/.cache/halfmoon; both are kept. All engines are loaded at once and measured in
rounds, one after the other, and medians are printed. What the cores can do at most is measured
in the same rounds.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.engine.rounds import CEILINGS, SYSTEMS, VLLM, Measured, RunChoices, measure_model
from benchmarks.engine.row_options import add_row_options, chosen_rows
from benchmarks.engine.rows import PrefillRow, comparison_table, conversion_table, memory_rows
from benchmarks.engine.shapes import ITEM_BYTES, SHAPES
from benchmarks.engine.ttft_reuse import measure_reuse
from benchmarks.vllm_cpu import VERSION, vllm_python

DEFAULT_SHAPES = "llama-8x512,qwen3-0.6b"


def main(arguments: list[str]) -> None:
    """Measure what the command line chooses, and print tables."""
    options = parser().parse_args(arguments)
    # As Ctrl-C does, so that no process is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    choices = RunChoices(
        systems=tuple(_chosen(options.systems, SYSTEMS, "--systems")),
        rows=() if options.only_ttft else chosen_rows(options),
        rounds=options.rounds,
        threads=options.threads,
        chunk=options.chunk,
        block_size=options.block_size,
        eager=options.enforce_eager,
        vllm_chunk=options.vllm_chunk,
        vllm_page=options.vllm_page,
        clock=options.clock,
    )
    shapes = [SHAPES[name] for name in _chosen(options.shapes, tuple(SHAPES), "--shapes")]
    precisions = _chosen(options.dtypes, tuple(ITEM_BYTES), "--dtypes")
    if VLLM in choices.systems:
        print("vLLM's environment is made if it is not there", file=sys.stderr, flush=True)
        vllm_python()
    # All engines are children of this process: they get the same cores.
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.sched_setaffinity(0, cores)
    print(_machine(options.threads, options.rounds, options.clock))
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="halfmoon-bench-") as folder:
        for shape in shapes:
            for precision in precisions:
                if not choices.rows:
                    continue
                measured = measure_model(shape, precision, choices, Path(folder))
                print(f"\n{_tables(shape.name, precision, choices, measured)}", flush=True)
                results.append(_record(shape.name, precision, measured))
        if not options.no_ttft:
            table = measure_reuse(shapes[0], precisions[0], choices, Path(folder))
            print(f"\n{table}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.engine")
    add = made.add_argument
    add("--shapes", default=DEFAULT_SHAPES, help=f"models, of {', '.join(SHAPES)}")
    add("--dtypes", default=",".join(ITEM_BYTES), help="precisions of weights and KV")
    add("--systems", default=f"halfmoon,{VLLM}", help=f"engines, of {', '.join(SYSTEMS)}")
    add_row_options(made)
    add("--rounds", type=int, default=5)
    add("--threads", type=int, default=2, help="of each engine, on as many cores")
    add("--chunk", type=int, default=2048, help="tokens of one forward pass of ours at the most")
    add("--block-size", type=int, default=64, help="tokens of a page of ours")
    add("--vllm-chunk", type=int, default=0, help="the same of vLLM; 0: its own choice")
    add("--vllm-page", type=int, default=128, help="tokens of a page of vLLM")
    add("--enforce-eager", action="store_true", help="vLLM without compilation: starts sooner")
    add(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor time per thread, for machines where other programs run",
    )
    servers = made.add_mutually_exclusive_group()
    servers.add_argument(
        "--no-ttft", action="store_true", help="leave out the repeated prompt through servers"
    )
    servers.add_argument(
        "--only-ttft",
        action="store_true",
        help="only the repeated prompt through servers, of the first model and precision: minutes",
    )
    add("--json", help="file for all measurements")
    return made


def _tables(name: str, precision: Any, choices: RunChoices, measured: Measured) -> str:
    most = measured.ceilings
    table = comparison_table(
        choices.rows,
        choices.systems,
        measured.seconds,
        SHAPES[name],
        precision,
        most,
        beside=VLLM,
    )
    modes = [f"{system}: {mode}" for system, mode in measured.modes.items() if system != CEILINGS]
    parts = [table, *([""] if modes else []), *modes]
    if measured.converting:
        parts[1:1] = ["", conversion_table(choices.rows, measured.seconds, measured.converting)]
    if most:
        ceilings = f"{most.flops_per_s / 1e9:,.0f} GFLOP/s, {most.bytes_per_s / 1e9:.1f} GB/s read"
        parts.append(f"ceilings: {ceilings}")
    prompts = [row.n_tokens for row in choices.rows if isinstance(row, PrefillRow)]
    if prompts:
        memory = memory_rows(
            choices.systems, measured.started_bytes, measured.peak_bytes, max(prompts)
        )
        parts += ["", memory]
    return "\n".join([*parts, *measured.notes])


def _record(name: str, precision: str, measured: Measured) -> dict[str, Any]:
    return {
        "shape": name,
        "dtype": precision,
        "modes": measured.modes,
        "seconds": [
            {"system": system, "row": row.label, "seconds": seconds}
            for (system, row), seconds in measured.seconds.items()
        ],
        "flops_per_s": measured.flops_per_s,
        "bytes_per_s": measured.bytes_per_s,
        "started_bytes": measured.started_bytes,
        "peak_bytes": measured.peak_bytes,
        "notes": measured.notes,
    }


def _machine(threads: int, rounds: int, clock: str) -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    load = os.getloadavg()[0]
    timed = "wall time" if clock == "wall" else "processor time per thread"
    return (
        f"{os.cpu_count()} cores ({model}), Linux {platform.release()}, Python"
        f" {platform.python_version()}; {threads} threads, vllm-cpu {VERSION}, medians of"
        f" {rounds} rounds, {timed}; load average at the start {load:.1f}"
    )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _chosen(text: str, known: tuple[Any, ...], flag: str) -> list[Any]:
    words = _words(text)
    if unknown := [word for word in words if word not in known]:
        raise SystemExit(f"{flag}: no {', '.join(unknown)}; there are: {', '.join(known)}")
    return words


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(map(str, error.cmd))} failed, see above") from None
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None
