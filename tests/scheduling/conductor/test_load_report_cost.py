"""A load report costs the same however many requests wait, in whatever phase they are.

Counted are the bytecode instructions that the conductor executes, which no other program changes.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    DecodeCost,
    DecodeLoad,
    DecodeReserved,
    PrefillCost,
    PrefillLoad,
    ToConductor,
)
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import MessageReceived, RequestArrived, WorkerJoined
from halfmoon_scheduling.requests.request_state import Phase
from halfmoon_testing.scheduling_inputs import a_landing, a_prefill_done, a_request, a_worker

D0, P0 = WorkerId("decode-0"), WorkerId("prefill-0")
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


class Core:
    """One prefill and one decode worker; a step takes 0.1 s for each request in it."""

    def __init__(self, **config: Any) -> None:
        limits = {"max_waiting": 10_000, "max_deferred": 10_000}
        self.conductor = Conductor(SchedulingConfig(**{**limits, **config}))
        prefill, step = PrefillCost(0.01, 1e-5), DecodeCost(d0_s=0.0, d1_s=0.1, d2_s=0.0)
        self.handle(WorkerJoined(a_worker(P0, prefill_cost=prefill)))
        self.handle(WorkerJoined(a_worker(D0, decode_cost=step, n_blocks=1_000_000)))

    def handle(self, event: Any) -> None:
        self.conductor.handle(event, 0.0)

    def hear(self, worker_id: WorkerId, message: ToConductor) -> None:
        self.handle(MessageReceived(worker_id, message))

    def advance(self, n_requests: int, phase: Phase, load: DecodeLoad) -> None:
        """Take so many requests to a phase; decode has this load when they reach it."""
        names = [f"cmpl-{i}" for i in range(n_requests)]
        if phase is not Phase.LANDED:
            self.hear(D0, load)
        for name in names:
            self.handle(RequestArrived(a_request(name, max_new_tokens=100)))
        if phase in (Phase.PREFILLING, Phase.DECODING, Phase.LANDED):
            for rid in map(RequestId, names):
                landing = a_landing(D0)
                self.hear(D0, DecodeReserved(request_id=rid, landing=landing, expires_s=60.0))
        if phase is Phase.LANDED:
            self.hear(D0, load)
        if phase in (Phase.DECODING, Phase.LANDED):
            for name in names:
                self.hear(P0, a_prefill_done(name))
        assert {self.conductor.phase_of(RequestId(name)) for name in names} == {phase}


def decode_load(n_running: int, free_pages: int) -> DecodeLoad:
    return DecodeLoad(
        n_running=n_running,
        n_reserved=0,
        context_tokens=0,
        free_pages=free_pages,
        n_pages=1_000_000,
        step_s=0.1 * n_running,
    )


PREFILL_LOAD = PrefillLoad(n_queued=1, queued_tokens=1_000_000, free_pages=9, n_pages=9)
LIMITS = {"admission": "lookahead", "tbt_slo_s": 0.25, "ttft_slo_s": 1000.0}


@pytest.mark.parametrize(
    ("phase", "config", "load"),
    [
        (Phase.RESERVING, {}, decode_load(1, 900_000)),
        (Phase.PREFILLING, {}, decode_load(1, 900_000)),
        (Phase.DECODING, {}, decode_load(500, 900_000)),
        (Phase.WAITING, {}, decode_load(3, 0)),
        (Phase.DEFERRED, {**LIMITS, "decode_time_s": 1e6}, decode_load(5, 900_000)),
        (Phase.LANDED, {**LIMITS, "decode_time_s": 1e-6}, decode_load(5, 900_000)),
    ],
    ids=lambda value: value.name if isinstance(value, Phase) else "",
)
def test_a_load_report_costs_the_same_for_few_and_for_many_waiting_requests(
    phase: Phase, config: dict[str, Any], load: DecodeLoad
) -> None:
    counts = []
    for n_requests in (FEW, MANY):
        core = Core(**config)
        core.advance(n_requests, phase, load)
        core.conductor.check()
        for worker_id, message in ((D0, load), (P0, PREFILL_LOAD)):
            core.hear(worker_id, message)  # the first report after so many changes
            n = count_instructions(lambda c=core, w=worker_id, m=message: c.hear(w, m))  # type: ignore[misc]
            counts.append((n_requests, worker_id, n))
    few, many = counts[:2], counts[2:]
    for (_, worker_id, n_few), (_, _, n_many) in zip(few, many, strict=True):
        assert n_few > 20 and n_many <= 1.2 * n_few, (worker_id, n_few, n_many)
