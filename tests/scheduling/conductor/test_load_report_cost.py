"""A load report costs the same however many requests wait, in whatever phase they are.

Counted are the bytecode instructions that the conductor executes, which no other program changes.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from halfmoon_protocol.messages import DecodeCost, DecodeLoad, PrefillCost
from halfmoon_scheduling.commands import AnyCommand
from halfmoon_scheduling.events import AnyEvent
from halfmoon_scheduling.requests.request_state import Phase
from tests.scheduling.core import D0, P0, Core, decode_load, prefill_load

FEW, MANY = 20, 400


def count_instructions(action: Callable[[], object]) -> int:
    """Count the bytecode instructions that an action executes, in all Python functions."""
    n = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal n
        frame.f_trace_opcodes = True
        n += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return n


class Line(Core):
    """One prefill and one decode worker; a step takes 0.1 s for each request in it."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**{"max_waiting": 10_000, "max_deferred": 10_000, **config})
        self.join(P0, prefill_cost=PrefillCost(0.01, 1e-5))
        step = DecodeCost(d0_s=0.0, d1_s=0.1, d2_s=0.0)
        self.join(D0, decode_cost=step, n_blocks=1_000_000)

    def handle(self, event: AnyEvent, now: float | None = None) -> list[AnyCommand]:
        return self.conductor.handle(event, 0.0)  # without the audit, which looks at all

    def advance(self, n_requests: int, phase: Phase, load: DecodeLoad) -> None:
        """Take so many requests to a phase; decode has this load when they reach it."""
        names = [f"cmpl-{i}" for i in range(n_requests)]
        if phase is not Phase.LANDED:
            self.hear(D0, load)
        for name in names:
            self.arrive(name, max_new_tokens=100)
        if phase in (Phase.PREFILLING, Phase.DECODING, Phase.LANDED):
            for name in names:
                self.reserved(rid=name)
        if phase is Phase.LANDED:
            self.hear(D0, load)
        if phase in (Phase.DECODING, Phase.LANDED):
            for name in names:
                self.prefilled(rid=name)
        assert {self.phase(name) for name in names} == {phase}


def load(n_running: int, free_pages: int = 900_000) -> DecodeLoad:
    return decode_load(free_pages, n_running=n_running, n_pages=1_000_000, step_s=0.1 * n_running)


LIMITS = {"admission": "lookahead", "tbt_slo_s": 0.25, "ttft_slo_s": 1000.0}


@pytest.mark.parametrize(
    ("phase", "config", "report"),
    [
        (Phase.RESERVING, {}, load(1)),
        (Phase.PREFILLING, {}, load(1)),
        (Phase.DECODING, {}, load(500)),
        (Phase.WAITING, {}, load(3, 0)),
        (Phase.DEFERRED, {**LIMITS, "decode_time_s": 1e6}, load(5)),
        (Phase.LANDED, {**LIMITS, "decode_time_s": 1e-6}, load(5)),
    ],
    ids=lambda value: value.name if isinstance(value, Phase) else "",
)
def test_a_load_report_costs_the_same_for_few_and_for_many_waiting_requests(
    phase: Phase, config: dict[str, Any], report: DecodeLoad
) -> None:
    counts = []
    for n_requests in (FEW, MANY):
        core = Line(**config)
        core.advance(n_requests, phase, report)
        core.conductor.check()
        for worker_id, message in ((D0, report), (P0, prefill_load(1_000_000))):
            core.hear(worker_id, message)  # the first report after so many changes
            n = count_instructions(lambda c=core, w=worker_id, m=message: c.hear(w, m))  # type: ignore[misc]
            counts.append((n_requests, worker_id, n))
    few, many = counts[:2], counts[2:]
    for (_, worker_id, n_few), (_, _, n_many) in zip(few, many, strict=True):
        assert n_few > 20 and n_many <= 1.2 * n_few, (worker_id, n_few, n_many)
