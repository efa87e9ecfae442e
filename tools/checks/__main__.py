"""`python -m tools.checks [NAME …]`: run all checks, or those named; exit 1 if one fails."""

import sys
from collections.abc import Callable
from pathlib import Path

from tools.checks import circles, names, prose

ROOT = Path(__file__).resolve().parents[2]
CHECKS: dict[str, Callable[[Path], list[str]]] = {
    "names": names.faults,
    "circles": circles.faults,
    "prose": prose.faults,
}


def main(wanted: list[str]) -> int:
    """Print every fault; return the exit status."""
    if unknown := [name for name in wanted if name not in CHECKS]:
        print(f"no check {', '.join(unknown)}; there are: {', '.join(CHECKS)}")
        return 2
    n_faults = 0
    for name in wanted or CHECKS:
        faults = CHECKS[name](ROOT)
        n_faults += len(faults)
        for fault in faults:
            print(f"{name}: {fault}")
    print(f"{n_faults} faults of {', '.join(wanted or CHECKS)}" if n_faults else "checks passed")
    return 1 if n_faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
