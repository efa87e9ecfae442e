"""Run all benchmarks, or those named: `python -m benchmarks [NAME …]`."""

import sys
from collections.abc import Callable

from rich.console import Console

from benchmarks import (
    conversation,
    kv_events,
    kvstore_question,
    overhead,
    request_cost,
    reservation,
    scheduling,
    simulator,
    step_overhead,
    ttft,
)

BENCHMARKS: dict[str, Callable[[Console], None]] = {
    "ttft": ttft.run,
    "conversation": conversation.run,
    "overhead": overhead.run,
    "request_cost": request_cost.run,
    "reservation": reservation.run,
    "kvstore_question": kvstore_question.run,
    "kv_events": kv_events.run,
    "scheduling": scheduling.run,
    "simulator": simulator.run_speed,
    "simulated": simulator.run_comparison,
    "step": step_overhead.run,
}


def main(names: list[str]) -> int:
    """Run those named, or all; the exit status."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are: {', '.join(BENCHMARKS)}")
        return 2
    console = Console()
    for name in names or BENCHMARKS:
        BENCHMARKS[name](console)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
