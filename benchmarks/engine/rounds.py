"""Measure the rows with one engine after the other, in rounds, while the others sleep."""

import os
import statistics
import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine.random_weights import model_folder
from benchmarks.engine.rows import Ceilings, MeasuredRow, PrefillRow, pool_sequences
from benchmarks.engine.runner_process import RunnerFailed, RunnerProcess
from benchmarks.engine.shapes import ModelShape, Precision
from benchmarks.vllm_cpu import our_vllm_python, vllm_environment, vllm_python

CEILINGS = "ceilings"
VLLM = "vLLM"
#: Our engine: as the environment says, with the native extension, and without.
OURS: dict[str, dict[str, str]] = {
    "halfmoon": {},
    "halfmoon-native": {"HALFMOON_ENGINE_NATIVE": "1"},
    "halfmoon-pure": {"HALFMOON_ENGINE_NATIVE": "0"},
}
#: Our engine with vLLM inside.
OURS_BY_VLLM = "halfmoon-vllm"
SYSTEMS = (*OURS, OURS_BY_VLLM, VLLM)
#: Tokens beside those of the rows: engines warm up with 512.
_SPARE_TOKENS = 640
#: Pools are given back between turns where they would take more than this share of the memory.
_POOLS_SHARE = 0.3
#: An idle engine may take this share of a core before a note says so.
_IDLE_SHARE = 0.02


@dataclass(frozen=True)
class RunChoices:
    """What the command line chose, the same for all models."""

    systems: tuple[str, ...]
    rows: tuple[MeasuredRow, ...]
    rounds: int
    threads: int
    #: Tokens of one forward of ours, and of a page of ours.
    chunk: int
    block_size: int
    #: vLLM without compilation.
    eager: bool
    #: Tokens of one pass of vLLM (0: its own choice), and of a page of it.
    vllm_chunk: int
    vllm_page: int
    #: "wall", or "cpu": processor time per thread, with threads that sleep while they wait.
    clock: str
    #: Seconds until an engine is ready, and until it has answered.
    start_within_s: float = 1200.0
    answer_within_s: float = 1200.0


@dataclass
class Measured:
    """Everything measured of one model in one precision."""

    seconds: dict[tuple[str, MeasuredRow], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    #: Seconds of each that went into copies between the pool and the layout of vLLM's kernels.
    converting: dict[tuple[str, MeasuredRow], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    modes: dict[str, str] = field(default_factory=dict)
    started_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    flops_per_s: list[float] = field(default_factory=list)
    bytes_per_s: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ceilings(self) -> Ceilings | None:
        """Medians; None: they were not measured."""
        if not self.flops_per_s:
            return None
        return Ceilings(statistics.median(self.flops_per_s), statistics.median(self.bytes_per_s))

    def note(self, text: str) -> None:
        """Keep a remark, once."""
        if text not in self.notes:
            self.notes.append(text)
            print(text, file=sys.stderr, flush=True)


def measure_model(
    shape: ModelShape, precision: Precision, choices: RunChoices, logs: Path
) -> Measured:
    """Start all engines, and measure every row in every round."""
    measured = Measured()
    release = _must_release(shape, precision, choices)
    with ExitStack() as stack:
        runners: dict[str, RunnerProcess] = {}
        for system in (CEILINGS, *choices.systems):
            print(f"{shape.name}, {precision}: {system} starts", file=sys.stderr, flush=True)
            try:
                runner = stack.enter_context(_start(system, shape, precision, choices, logs))
                ready = runner.ready(choices.start_within_s)
            except (RunnerFailed, OSError) as error:
                measured.note(f"{shape.name}, {precision}, {system}: {error}")
                continue
            runners[system] = runner
            measured.modes[system] = ready["mode"]
            if system != CEILINGS:
                measured.started_bytes[system] = ready["resident_bytes"]
        for number in range(choices.rounds):
            print(f"{shape.name}, {precision}: round {number + 1}", file=sys.stderr, flush=True)
            _measure_round(number, runners, choices, measured, release)
    return measured


def _measure_round(
    number: int,
    runners: dict[str, RunnerProcess],
    choices: RunChoices,
    measured: Measured,
    release: bool,
) -> None:
    if CEILINGS in runners:
        found = _ask(CEILINGS, runners, {"op": "ceilings"}, choices, measured)
        if found:
            measured.flops_per_s.append(found["flops_per_s"])
            measured.bytes_per_s.append(found["bytes_per_s"])
    systems = [system for system in choices.systems if system in runners]
    for row in choices.rows:
        # Who goes first changes, so that a machine that slows down does so for all.
        for system in systems if number % 2 == 0 else reversed(systems):
            operation = row.operation() | {"release": release}
            found = _ask(system, runners, operation, choices, measured)
            if not found:
                continue
            measured.seconds[system, row] += found["seconds"]
            if system == OURS_BY_VLLM:
                measured.converting[system, row].append(found["converting_s"])
            if isinstance(row, PrefillRow):
                most = max(measured.peak_bytes.get(system, 0), found["peak_bytes"])
                measured.peak_bytes[system] = most


def _ask(
    system: str,
    runners: dict[str, RunnerProcess],
    operation: dict[str, Any],
    choices: RunChoices,
    measured: Measured,
) -> dict[str, Any]:
    """Return a runner's answer; nothing, and a note, where it has none."""
    idle = {name: runner.processor_s() for name, runner in runners.items() if name != system}
    before_s = os.times().elapsed
    try:
        found = runners[system].ask(operation, choices.answer_within_s)
    except RunnerFailed as error:
        measured.note(f"{system}, {operation}: {error}")
        return {}
    taken_s = os.times().elapsed - before_s
    for name, was_s in idle.items():
        spent_s = runners[name].processor_s() - was_s
        if taken_s > 1.0 and spent_s > _IDLE_SHARE * taken_s:
            share = spent_s / taken_s
            measured.note(f"{name} took {share:.0%} of a core while {system} was measured")
    return found


def _start(
    system: str, shape: ModelShape, precision: Precision, choices: RunChoices, logs: Path
) -> RunnerProcess:
    """Start one program.

    Raises:
        CalledProcessError: vLLM, or the model, can't be had.
    """
    settings: dict[str, Any] = {
        "dtype": precision,
        "threads": choices.threads,
        "clock": choices.clock,
        "block_size": choices.block_size,
        "chunk": choices.chunk,
        "eager": choices.eager,
        "vllm_chunk": choices.vllm_chunk,
        "vllm_page": choices.vllm_page,
        "max_context": max(max(row.sequences) for row in choices.rows) + _SPARE_TOKENS,
        "kv_token_bytes": shape.kv_token_bytes(precision),
        "sequences": (*pool_sequences(choices.rows), _SPARE_TOKENS),
        "model": str(model_folder(shape)),
        "engine": "torch",
        "engine_options": {},
    }
    python, program = Path(sys.executable), "ours.py"
    environment = {**os.environ, **OURS.get(system, {})}
    if system == CEILINGS:
        program = "ceilings.py"
    elif system == VLLM:
        python, program = vllm_python(), "vllm_engine.py"
        environment = vllm_environment(choices.threads)
    elif system == OURS_BY_VLLM:
        python = our_vllm_python()
        environment = vllm_environment(choices.threads)
        options = {"enforce_eager": str(choices.eager).lower()}
        settings |= {"engine": "vllm", "engine_options": options}
    if choices.clock == "cpu":
        # A thread that spins while it waits would be counted as if it worked.
        environment |= {"GOMP_SPINCOUNT": "1000"}
    log = logs / f"{shape.name}-{precision}-{system}.log"
    return RunnerProcess(python, program, settings, environment, log)


def _must_release(shape: ModelShape, precision: Precision, choices: RunChoices) -> bool:
    """Return whether pools are too large to be held by engines whose turn it is not."""
    pool = sum(pool_sequences(choices.rows)) * shape.kv_token_bytes(precision)
    return pool * len(choices.systems) > _POOLS_SHARE * available_bytes()


def available_bytes() -> int:
    """Return the memory that programs can still have without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")
