"""Compare our transfer library with its peers in one run: `python -m benchmarks.transfer`.

Each peer's package is installed into an environment of its own under
~/.cache/halfmoon/bench-venvs when it is not there yet; one that can't be installed or does
not run is shown as missing. All peers are measured one after the other, several times over,
and medians are printed: a machine's mood then falls on all of them alike. Quote ratios only.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import venv
from collections import defaultdict
from pathlib import Path

from benchmarks.time_limit import rounds_within

PROGRAMS = Path(__file__).with_name("peers")
ENVIRONMENTS = Path.home() / ".cache" / "halfmoon" / "bench-venvs"
KIB, MIB = 1024, 1024 * 1024
#: Without 256 MiB, which takes half of the time: `--sizes 268435456`.
SIZES = [4 * KIB, 64 * KIB, MIB, 16 * MIB]

#: Label: program with arguments, what to install for it, and its environment variables.
#: None: it runs where we run.
PEERS: dict[str, tuple[list[str], list[str] | None, dict[str, str]]] = {
    "one memory copy": (["memcopy.py"], None, {}),
    "plain sockets": (["plain_sockets.py"], None, {}),
    "iperf3": (["iperf.py"], None, {}),
    "reference, tcp": (
        ["mooncake_engine.py"],
        ["mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"],
        {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "GLOG_minloglevel": "2"},
    ),
    "NIXL, tcp": (["nixl_ucx.py"], ["nixl==1.5.1", "numpy"], {"UCX_TLS": "tcp"}),
    "NIXL, shm": (["nixl_ucx.py"], ["nixl==1.5.1", "numpy"], {"UCX_TLS": "shm,tcp"}),
    "gloo": (["gloo.py"], None, {"GLOO_SOCKET_IFNAME": "lo"}),
    "pyzmq": (["zmq_pair.py"], None, {}),
    "Redis": (["redis_values.py"], None, {}),
    "halfmoon, tcp, native": (["ours.py", "tcp", "sums,native"], None, {}),
    "halfmoon, tcp, native, no checksums": (["ours.py", "tcp", "bare,native"], None, {}),
    "halfmoon, tcp, pure": (["ours.py", "tcp", "sums,pure"], None, {}),
    "halfmoon, tcp, pure, no checksums": (["ours.py", "tcp", "bare,pure"], None, {}),
    "halfmoon, shm": (["ours.py", "shm", "sums,pure"], None, {}),
}

Results = dict[tuple[str, str, int], list[dict[str, float]]]


def python_for(packages: list[str] | None) -> Path:
    """The interpreter of an environment with these packages; made if it is not there."""
    if packages is None:
        return Path(sys.executable)
    folder = ENVIRONMENTS / packages[0].split("==")[0].split("-")[0]
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
            check=True,
        )
    return python


def installed(packages: dict[str, list[str] | None], problems: dict[str, str]) -> list[str]:
    """Install what these peers need, before time counts; return the labels of those that run.

    Args:
        packages: what to install, by label.
        problems: gets a text for each label that is left out.
    """
    labels = []
    for label, wanted in packages.items():
        try:
            python_for(wanted)
        except (OSError, subprocess.CalledProcessError) as error:
            problems[label] = f"can't be installed: {error}"
        else:
            labels.append(label)
    return labels


def measure(label: str, ops: str, sizes: list[int], seconds: float, results: Results) -> str:
    """Run one peer; what went wrong, or nothing."""
    program, packages, variables = PEERS[label]
    python = python_for(packages)
    texts = [",".join(map(str, sizes)), str(seconds)]
    try:
        done = subprocess.run(
            [python, PROGRAMS / program[0], *program[1:], ops, *texts],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=60 + 10 * seconds * len(sizes),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "did not end"
    found = 0
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            result = json.loads(line)
            if "error" not in result:
                found += 1
                results[label, result["op"], result["size"]].append(result)
    return "" if found else f"did not run: {done.stderr.strip()[-200:]}"


def table(
    labels: list[str], op: str, field: str, digits: int, sizes: list[int], results: Results
) -> str:
    """One figure of one op: a row per peer, a column per size."""
    names = [f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB" for size in sizes]
    lines = [f"| {op} | {' | '.join(names)} |", "|---" * (len(sizes) + 1) + "|"]
    for label in labels:
        cells = [
            f"{statistics.median(found):.{digits}f}"
            if (
                found := [
                    each[field] for each in results.get((label, op, size), ()) if field in each
                ]
            )
            else "–"
            for size in sizes
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer")
    parser.add_argument("--ops", default="write,read")
    parser.add_argument(
        "--sizes", default=",".join(map(str, SIZES)), help="bytes; by default 4 KiB to 16 MiB"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="per figure and round")
    parser.add_argument("--rounds", type=int, default=3, help="at most; see --minutes")
    parser.add_argument("--minutes", type=float, default=4.0, help="no round begins beyond that")
    parser.add_argument("--only", default="", help="a pattern of labels")
    chosen = parser.parse_args()
    sizes = [int(size) for size in chosen.sizes.split(",")]
    results: Results = defaultdict(list)
    missing: dict[str, str] = {}
    wanted = {label: peer[1] for label, peer in PEERS.items() if re.search(chosen.only, label)}
    labels = installed(wanted, missing)
    number = 0
    try:
        for number in rounds_within(chosen.rounds, chosen.minutes):
            for label in labels:
                print(f"round {number + 1}: {label}", file=sys.stderr, flush=True)
                if problem := measure(label, chosen.ops, sizes, chosen.seconds, results):
                    missing[label] = problem
    except KeyboardInterrupt:
        print("stopped; what was measured until then:\n")
    print(f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}, ", end="")
    print(f"Python {platform.python_version()}; medians of {number + 1} rounds\n")
    for op in chosen.ops.split(","):
        for field, unit, digits in (
            ("gb_per_s", "GB/s, batched", 2),
            ("p50_us", "µs of a single block, median", 0),
            ("cpu_s_per_gb", "processor seconds per GB, both sides, batched", 2),
        ):
            print(f"{op}: {unit}\n\n{table(labels, op, field, digits, sizes, results)}\n")
    for label, problem in missing.items():
        print(f"{label}: {problem}")
    print_ratios(sizes, results)


TCP_PEERS = ("reference, tcp", "NIXL, tcp")
#: Op, our row, the others', and the goal of the ratio in batches to the fastest of them.
GOALS = (
    *((op, "halfmoon, tcp, native", TCP_PEERS, 1.3) for op in ("write", "read")),
    *((op, "halfmoon, tcp, native, no checksums", TCP_PEERS, 1.6) for op in ("write", "read")),
    *(
        (op, "halfmoon, tcp, native, no checksums", ("plain sockets",), 0.9)
        for op in ("write", "read")
    ),
    ("read", "halfmoon, shm", ("NIXL, shm",), 1.5),
    ("read", "halfmoon, shm", ("one memory copy",), 0.9),
)


def print_ratios(sizes: list[int], results: Results) -> None:
    """Print how our speed in batches compares with the fastest peer's, by size; goals from 64 KiB.

    The single block of 4 KiB over TCP has a goal of its own: NIXL's time.
    """

    def medians(labels: tuple[str, ...], op: str, size: int, field: str) -> list[float]:
        return [
            statistics.median(each[field] for each in found)
            for label in labels
            if (found := results.get((label, op, size)))
        ]

    print()
    for op, ours, others, goal in GOALS:
        shown = [
            f"{own[0] / max(theirs):.2f}"
            for size in sizes
            if (own := medians((ours,), op, size, "gb_per_s"))
            and (theirs := medians(others, op, size, "gb_per_s"))
        ]
        if shown:
            best = " or ".join(others)
            print(f"{op}, batches, {ours} to {best}: {' / '.join(shown)}; the goal is {goal}")
    for op in ("write", "read"):
        own = medians(("halfmoon, tcp, native",), op, 4 * KIB, "p50_us")
        theirs = medians(("NIXL, tcp",), op, 4 * KIB, "p50_us")
        if own and theirs:
            ratio = min(theirs) / own[0]
            print(f"{op}, 4 KiB, a single block over tcp to NIXL: {ratio:.2f}; the goal is 1.0")


if __name__ == "__main__":
    main()
