"""Simulate many seeds, and report; `python -m halfmoon_testing.sim_cluster --help`."""

import argparse
import gc
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from halfmoon_testing.sim_cluster.sim_run import SimResult, run_seed

#: Lines of the log that a violation shows.
_LAST_LINES = 60
_PROGRESS_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if an invariant did not hold, 2 for wrong arguments."""
    arguments = _parser().parse_args(argv)
    if arguments.seed is not None:
        return _run_one(arguments.seed, with_log=arguments.log)
    return _run_many(arguments.seeds, arguments.jobs, arguments.violations)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="halfmoon sim-cluster",
        description="Run the real services under a virtual clock, with faults drawn from a seed.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, metavar="N", help="run this seed again")
    which.add_argument(
        "--seeds",
        type=_seeds,
        default=range(100),
        metavar="FIRST:END",
        help="run these seeds, without END itself (default: 0:100)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="processes that run seeds (default: 1)"
    )
    parser.add_argument("--log", action="store_true", help="print the whole log of --seed")
    parser.add_argument(
        "--violations",
        type=int,
        default=10,
        metavar="N",
        help="stop after so many seeds in which an invariant did not hold (default: 10)",
    )
    return parser


def _seeds(text: str) -> range:
    first, colon, end = text.partition(":")
    if not colon or not first.isdecimal() or not end.isdecimal() or int(first) >= int(end):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:END, such as 0:1000")
    return range(int(first), int(end))


def _run_one(seed: int, *, with_log: bool) -> int:
    result = run_seed(seed, with_log=True)
    if with_log:
        sys.stdout.write("\n".join(result.log) + "\n")
    print(_summary_of(result))
    if result.violation is None:
        return 0
    _print_violation(result, lines=0 if with_log else _LAST_LINES)
    return 1


def _run_many(seeds: range, jobs: int, most: int) -> int:
    total, violated = SimTotals(), 0
    began = shown = time.monotonic()
    for result in _results(seeds, jobs):
        total.add(result)
        if result.violation is not None:
            violated += 1
            _print_violation(run_seed(result.seed, with_log=True), lines=_LAST_LINES)
            if violated >= most:
                break
        if time.monotonic() - shown > _PROGRESS_S:
            shown = time.monotonic()
            rate = total.n_seeds / (shown - began)
            print(f"{total.n_seeds} of {len(seeds)} seeds, {rate:.1f} a second", flush=True)
    print(total.table(time.monotonic() - began))
    return 1 if violated else 0


def _results(seeds: range, jobs: int) -> Iterator[SimResult]:
    gc.freeze()  # what is imported stays: each run's collection looks at that run alone
    if jobs <= 1:
        yield from map(run_seed, seeds)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=4)


def _print_violation(result: SimResult, lines: int) -> None:
    violation = result.violation
    assert violation is not None, "the seed did not repeat its violation"
    print(f"seed {result.seed}: {violation.invariant}\n  {violation.what}")
    if lines:
        print("\n".join(f"  | {line}" for line in result.log[-lines:]))
    print(f"  repeat it with: halfmoon sim-cluster --seed {result.seed} --log", flush=True)


def _summary_of(result: SimResult) -> str:
    ends = ", ".join(f"{n} {end}" for end, n in sorted(result.ends.items()))
    faults = ", ".join(f"{n} × {fault}" for fault, n in sorted(result.faults.items())) or "none"
    return (
        f"seed {result.seed}: {result.virtual_s:.2f} virtual s, {result.n_messages} messages;"
        f" requests: {ends}; faults: {faults}"
    )


class SimTotals:
    """Sums over many seeds."""

    def __init__(self) -> None:
        """Start without a seed."""
        self.n_seeds = 0
        self.n_violated = 0
        self.virtual_s = 0.0
        self.n_messages = 0
        self.longest_recovery_s = 0.0
        self.ends: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()

    def add(self, result: SimResult) -> None:
        """Add a seed."""
        self.n_seeds += 1
        self.n_violated += result.violation is not None
        self.virtual_s += result.virtual_s
        self.n_messages += result.n_messages
        self.longest_recovery_s = max(self.longest_recovery_s, result.recovery_s)
        self.ends += result.ends
        self.faults += result.faults

    def table(self, seconds: float) -> str:
        """Describe the sums, one line each."""
        rows = [
            ("seeds", f"{self.n_seeds:,} in {seconds:.0f} s"),
            ("seeds a second", f"{self.n_seeds / max(seconds, 1e-9):.1f}"),
            ("violated", f"{self.n_violated:,}"),
            ("virtual time", f"{self.virtual_s / 3600:.2f} h"),
            ("messages", f"{self.n_messages:,}"),
            ("longest recovery", f"{self.longest_recovery_s:.2f} s"),
            *((f"requests: {end}", f"{n:,}") for end, n in sorted(self.ends.items())),
            *((f"faults: {name}", f"{n:,}") for name, n in sorted(self.faults.items())),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


if __name__ == "__main__":
    sys.exit(main())
