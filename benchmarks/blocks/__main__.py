"""Compare a kvstore with its peers in one run, as Markdown: `python -m benchmarks.blocks`.

Put and get of blocks, one at a time and in batches of 64 (16 of 16 MiB), and asking whether they
are there. Remote means over TCP of this host; local means memory that both processes have mapped.
The disk's peers work in the current folder: start it where the file system is that you mean.

Each peer's package is in an environment of its own, made when it is not there yet. All peers are
measured one after the other, several times over, and medians are printed: quote ratios only.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from benchmarks.time_limit import rounds_within
from benchmarks.transfer.__main__ import MIB, Results, installed, python_for, table

PROGRAMS = Path(__file__).resolve().with_name("peers")
#: Where `benchmarks` is imported from: a program that is run by its path has its own folder only.
ROOT = PROGRAMS.parents[2]
SIZES = [65_536, MIB, 16 * MIB]
#: Label: program with arguments, what to install for it, and its environment variables.
PEERS: dict[str, tuple[list[str], list[str] | None, dict[str, str]]] = {
    "one memory copy": (["memcopy.py"], None, {}),
    "reference's store, tcp": (
        ["mooncake_store.py"],
        ["mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"],
        {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "GLOG_minloglevel": "2"},
    ),
    "Redis, tcp": (["redis_values.py"], None, {}),
    "halfmoon, tcp": (["ours.py", "tcp"], None, {}),
    "halfmoon, tcp, summed twice": (["ours.py", "twice"], None, {}),
    "halfmoon, shared memory": (["ours.py", "shm"], None, {}),
    "halfmoon, no copy, verified": (["ours.py", "view"], None, {}),
    "halfmoon, no copy": (["ours.py", "unverified"], None, {}),
    "disk": (["disk.py"], None, {}),
}
#: What is printed: op, field, title, digits.
TABLES = (
    ("put", "gb_per_s", "put: GB/s, in batches", 2),
    ("get", "gb_per_s", "get: GB/s, in batches", 2),
    ("put", "p50_us", "put: µs of a single block, median", 0),
    ("get", "p50_us", "get: µs of a single block, median", 0),
    ("exists", "batch_us", "whether a batch is there: µs, median", 0),
    ("exists", "p50_us", "whether one block is there: µs, median", 0),
)


def measure(label: str, sizes: list[int], seconds: float, results: Results) -> str:
    """Run one peer; what went wrong, or nothing."""
    program, packages, variables = PEERS[label]
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        python = python_for(packages)
        done = subprocess.run(
            [python, PROGRAMS / program[0], *program[1:], ",".join(map(str, sizes)), str(seconds)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)} | variables,
            capture_output=True,
            text=True,
            timeout=120 + 20 * seconds * len(sizes),
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    problem = "" if done.stdout else f"did not run: {done.stderr.strip()[-300:]}"
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            result = json.loads(line)
            if "error" in result:
                problem = f"{result['op']} of {result['size']}: {result['error']}"
            else:
                results[result.get("label", label), result["op"], result["size"]].append(result)
    return problem


def main() -> int:
    """Measure and print; 1 when a row of ours is missing, which is a mistake of ours."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blocks")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of a block")
    parser.add_argument("--seconds", type=float, default=0.4, help="per figure and round")
    parser.add_argument("--rounds", type=int, default=3, help="at most; see --minutes")
    parser.add_argument("--minutes", type=float, default=4.0, help="no round begins beyond that")
    parser.add_argument("--only", default="", help="a pattern of labels")
    chosen = parser.parse_args()
    sizes = [int(size) for size in chosen.sizes.split(",")]
    results: Results = defaultdict(list)
    problems: dict[str, str] = {}
    wanted = {label: peer[1] for label, peer in PEERS.items() if re.search(chosen.only, label)}
    labels = installed(wanted, problems)
    number = 0
    for number in rounds_within(chosen.rounds, chosen.minutes):
        for label in labels:
            print(f"round {number + 1}: {label}", file=sys.stderr, flush=True)
            if problem := measure(label, sizes, chosen.seconds, results):
                problems[label] = problem
    print(f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}, ", end="")
    print(f"Python {platform.python_version()}; medians of {number + 1} rounds\n")
    for op, field, title, digits in TABLES:
        with_figures = list(dict.fromkeys(label for label, an_op, _ in results if an_op == op))
        if with_figures:
            print(f"{title}\n\n{table(with_figures, op, field, digits, sizes, results)}\n")
    for label, problem in problems.items():
        print(f"{label}: {problem}")
    print_ratios(sizes, results)
    return int(any(label.startswith("halfmoon") or label == "disk" for label in problems))


#: Our row, the other's, and the goal of the ratio in speed; the goals are set from 1 MiB on.
BATCH_GOALS = (
    ("get", "halfmoon, tcp", "reference's store, tcp", 1.5),
    ("get", "halfmoon, no copy, verified", "one memory copy", 1.0),
    ("get", "halfmoon, no copy", "one memory copy", 1.0),
    ("get", "halfmoon, disk tier", "O_DIRECT, 8 threads", 0.8),
)
SINGLE_GOALS = (
    ("get", "halfmoon, tcp", "reference's store, tcp", 1.0),
    ("put", "halfmoon, tcp", "reference's store, tcp", 1.0),
)


def print_ratios(sizes: list[int], results: Results) -> None:
    """Print how our speed compares with others', where there is a goal, by size of a block."""

    def median(label: str, op: str, size: int, field: str) -> float:
        return statistics.median(each[field] for each in results[label, op, size])

    for title, goals, field, power in (
        ("batches", BATCH_GOALS, "gb_per_s", 1),
        ("a single block", SINGLE_GOALS, "p50_us", -1),
    ):
        for op, ours, other, goal in goals:
            shown = [
                f"{(median(ours, op, size, field) / median(other, op, size, field)) ** power:.2f}"
                for size in sizes
                if results.get((ours, op, size)) and results.get((other, op, size))
            ]
            if shown:
                print(f"{op}, {title}, {ours} to {other}: {' / '.join(shown)}; the goal is {goal}")


if __name__ == "__main__":
    sys.exit(main())
