"""Compare our conductor with routers of other projects: `python -m benchmarks.conductor`.

Latency: Poisson arrivals of prompts of 512 tokens, 16 new tokens each, one per 10 ms after the
first. Then streams at two paces, and as many requests as go through: for these what is measured
has one core to itself, pinned; the engine behind it and the client share another one. The engine
costs nothing: what a router adds is its TTFT less that of asking the engine's server directly, and
what our conductor adds is its TTFT less that of asking our fake workers directly, in their
protocol.

Prints Markdown. Medians over rounds; all targets are measured in each.
"""

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from benchmarks.conductor.load import Figures, Plan
from benchmarks.conductor.prompts import N_TOKENS, Prompts
from benchmarks.conductor.targets import (
    ANY_CORE,
    DIRECT,
    HALFMOON,
    OWN_CORE,
    ROUTE,
    ROUTERS,
    WORKERS,
    Target,
    run_load,
    run_round_trips,
    running,
    stage_seconds,
)

STEP_S = 0.01
#: Streams at once, and tokens per second that the engine makes for all of them: the goal of one
#: conductor, and twice that. An engine without a pace would measure queues.
N_STREAMS, PACES_PER_S = 128, (20_000, 40_000)
N_PROMPTS = 500

Rows = dict[tuple[str, str], list[dict[str, float]]]


def percentile(values: Sequence[float], share: float) -> float:
    """Of a sample that is not empty."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def figures_of(plan: Plan) -> dict[str, float]:
    """Carry a plan out: what is shown of it.

    Raises:
        RuntimeError: an answer was none, or not whole.
    """
    seen = msgspec.json.decode(run_load(msgspec.json.encode(plan)), type=Figures)
    if seen.n_failed or not seen.n_requests + seen.n_events:
        raise RuntimeError(f"{seen.n_failed} of {seen.n_requests} requests failed")
    shown = {
        "requests/s": seen.n_requests / seen.seconds,
        "tokens/s": seen.n_events / seen.seconds,
        "client": seen.own_cpu_s / seen.seconds,
    }
    if seen.ttft_s:
        shown["p50"] = percentile(seen.ttft_s, 0.5)
        shown["p99"] = percentile(seen.ttft_s, 0.99)
    if seen.tbt_s:
        shown["TBT p50"] = percentile(seen.tbt_s, 0.5)
        shown["TBT p99"] = percentile(seen.tbt_s, 0.99)
    if seen.cpu_s:
        shown["busy"] = sum(seen.cpu_s) / seen.seconds
        shown["s/request"] = sum(seen.cpu_s) / max(1, seen.n_requests)
        shown["s/token"] = sum(seen.cpu_s) / max(1, seen.n_events)
    return shown


class Run:
    """All measurements, and their rows."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._seconds: float = arguments.seconds
        self._rate: float = arguments.rate
        self._seed: int = arguments.seed
        self._folder = folder
        self._prompts = Prompts.make(folder / "tokenizer", random.Random(self._seed), N_PROMPTS)
        self.rows: Rows = defaultdict(list)
        self.missing: dict[str, str] = {}

    def round(self, labels: Sequence[str], what: Sequence[str]) -> None:
        """Each target once."""
        for label in labels:
            try:
                if "latency" in what:
                    with self._running(label, STEP_S, cores=ANY_CORE) as target:
                        self._latencies(label, target)
                if "requests" in what:
                    with self._running(label, STEP_S) as target:
                        plan = self._plan(
                            target, self._prompts.texts, kind="closed", load=32, n_new=1
                        )
                        self._note(label, "requests, text", plan)
                        plan = msgspec.structs.replace(plan, prompts=self._prompts.ids)
                        self._note(label, "requests, ids", plan)
                if "tokens" in what:
                    self._tokens(label)
            except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
                self.missing[label] = str(error)
                print(f"{label}: {error}", file=sys.stderr)

    def _running(
        self, label: str, step_s: float, cores: str = OWN_CORE
    ) -> AbstractContextManager[Target]:
        prompts = self._prompts
        return running(label, prompts.tokenizer, prompts.words, step_s, self._folder, cores=cores)

    def _latencies(self, label: str, target: Target) -> None:
        for kind, prompts in (("ids", self._prompts.ids), ("text", self._prompts.texts)):
            if label == HALFMOON:
                self._workers_alone(target, f"latency, {kind}")
            plan = self._plan(target, prompts, kind="open", load=self._rate, n_new=16)
            before = stage_seconds(target.port) if label == HALFMOON else {}
            self._note(label, f"latency, {kind}", plan)
            for stage, (seconds, n) in before.items():
                after = stage_seconds(target.port)[stage]
                mean_s = (after[0] - seconds) / max(1.0, after[1] - n)
                self.rows[stage, f"stages, {kind}"].append({"mean": mean_s})

    def _workers_alone(self, target: Target, what: str) -> None:
        taken_s = run_round_trips(
            target.metadata_port, self._rate, self._seconds, N_TOKENS, self._seed
        )
        row = {f"p{share}": percentile(taken_s, share / 100) for share in (50, 99)}
        self.rows[WORKERS, what].append(row)
        print(f"{WORKERS}: {what}: {row}", file=sys.stderr)

    def _tokens(self, label: str) -> None:
        for pace in PACES_PER_S:
            with self._running(label, N_STREAMS / pace) as target:
                short = [self._prompts.short_text]
                plan = self._plan(target, short, kind="closed", load=N_STREAMS, n_new=100_000)
                self._note(label, f"tokens, {pace} made per second", plan)

    def _plan(
        self, target: Target, prompts: list[msgspec.Raw], *, kind: str, load: float, n_new: int
    ) -> Plan:
        given = {"port": target.port, "kind": kind, "load": load, "seconds": self._seconds}
        plan = {**given, "warm_s": 0.7, "n_new": n_new, "seed": self._seed, "prompts": []}
        return msgspec.structs.replace(
            msgspec.convert({**plan, "pids": target.pids}, Plan), prompts=prompts
        )

    def _note(self, label: str, what: str, plan: Plan) -> None:
        try:
            shown = figures_of(plan)
        except RuntimeError as error:
            self.missing[f"{label}, {what}"] = str(error)
            return
        self.rows[label, what].append(shown)
        told = "  ".join(f"{name} {value:.6g}" for name, value in shown.items())
        print(f"{label}: {what}: {told}", file=sys.stderr)


#: Column: row's name, figure, unit's factor, digits.
LATENCY = {
    "TTFT p50, ms": ("p50", 1e3, 2),
    "p99": ("p99", 1e3, 2),
    "CPU, µs per request": ("s/request", 1e6, 0),
}
TOKENS = {
    "tokens/s": ("tokens/s", 1, 0),
    "TBT p50, ms": ("TBT p50", 1e3, 2),
    "p99": ("TBT p99", 1e3, 2),
    "CPU, µs per token": ("s/token", 1e6, 1),
    "of a core": ("busy", 1, 2),
    "client's": ("client", 1, 2),
}
STAGES = {"mean, µs": ("mean", 1e6, 0)}
REQUESTS = {"requests/s": ("requests/s", 1, 0), "CPU, µs per request": ("s/request", 1e6, 0)}


def table(rows: Rows, what: str, columns: dict[str, tuple[str, float, int]]) -> str:
    """One measurement: a row per target, medians over rounds."""
    added = ["added p50", "added p99"] if what.startswith("latency") else []
    lines = [f"| {' | '.join([what, *columns, *added])} |", "|---" * (1 + len([*columns, *added]))]
    lines[1] += "|"

    def median(label: str, figure: str) -> float | None:
        found = [row[figure] for row in rows.get((label, what), ()) if figure in row]
        return statistics.median(found) if found else None

    for label in dict.fromkeys(label for label, measured in rows if measured == what):
        cells = []
        for figure, factor, digits in columns.values():
            seen = median(label, figure)
            cells.append("–" if seen is None else f"{seen * factor:.{digits}f}")
        for figure in ("p50", "p99") if added else ():
            seen = median(label, figure)
            floor = median(WORKERS if label == HALFMOON else DIRECT, "p50")
            is_floor = label in (DIRECT, WORKERS) or seen is None or floor is None
            cells.append("–" if is_floor else f"{1e3 * (seen - floor):.2f}")  # type: ignore[operator]
        lines.append(f"| {' | '.join([label, *cells])} |")
    return "\n".join(lines)


def main() -> None:
    """Run all, print tables."""
    labels = [DIRECT, HALFMOON, ROUTE, *ROUTERS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conductor")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="labels that contain one of these, with |")
    parser.add_argument("--what", default="latency,tokens,requests")
    parser.add_argument("--rows", type=Path, help="file of rounds: read, added to, and shown")
    arguments = parser.parse_args()
    wanted = arguments.only.split("|")
    chosen = [label for label in labels if any(each in label for each in wanted)]
    with tempfile.TemporaryDirectory() as folder:
        run = Run(arguments, Path(folder))
        if arguments.rows is not None and arguments.rows.exists():
            for label, what, row in msgspec.json.decode(arguments.rows.read_bytes()):
                run.rows[label, what].append(row)
        for _ in range(arguments.rounds):
            run.round(chosen, arguments.what.split(","))
    if arguments.rows is not None:
        kept = [(*key, row) for key, rows in run.rows.items() for row in rows]
        arguments.rows.write_bytes(msgspec.json.encode(kept))
    for what in dict.fromkeys(what for _, what in run.rows):
        columns = {"l": LATENCY, "t": TOKENS, "r": REQUESTS, "s": STAGES}[what[0]]
        print(table(run.rows, what, columns), end="\n\n")
    for label, why in run.missing.items():
        print(f"{label}: {why}")


if __name__ == "__main__":
    main()
