"""The log of decisions is bounded in number and in bytes, and the oldest decisions go first."""

import tracemalloc

import msgspec
import pytest

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.admission.admission_policy import AdmissionVerdict
from halfmoon_scheduling.conductor.decision_log import DecisionLog, estimated_bytes
from halfmoon_scheduling.placement.estimates import Estimate, Placement
from halfmoon_scheduling.placement.local_prefill import LocalPrefillEstimate
from halfmoon_scheduling.placement.prefill_groups import GroupEstimate
from halfmoon_scheduling.requests.request_state import RequestState
from halfmoon_testing.scheduling_inputs import a_request
from tests.scheduling.core import Core

MIB = 2**20


def a_row(i: int, kind: type[Estimate] = Estimate, **more: object) -> Estimate:
    """Return a row with numbers of its own, as a placement computes them."""
    names = "queue_s", "transfer_s", "prefill_s", "ttft_s", "stalled_step_s", "tbt_slo_s"
    fields: dict[str, object] = {name: i + 0.1 * j for j, name in enumerate(names, start=1)}
    fields |= dict.fromkeys(("worker_id", "home", "instead_of"), WorkerId("w"))
    fields |= dict.fromkeys(("local_blocks", "n_blocks", "transfer_blocks"), 0)
    return msgspec.convert({"source": None, **fields, **more}, kind)


def a_placement(rows: tuple[Estimate, ...]) -> Placement:
    return Placement(chosen=rows[0], decode=WorkerId("d"), tbt_s=0.1, estimates=rows)


def record(log: DecisionLog, number: int, placement: Placement, reason: str = "") -> None:
    state = RequestState(a_request(f"cmpl-{number}"), number, 0.0)
    log.record(state, placement, AdmissionVerdict(reason=reason), 1.0, "placed")
    log.check()


def kept(log: DecisionLog) -> list[str]:
    return [decision.request_id for decision in log.decisions]


def test_the_oldest_decisions_go_when_their_number_or_their_bytes_are_reached() -> None:
    log = DecisionLog(2, MIB)
    for number in range(4):
        record(log, number, a_placement((a_row(0),)))
    assert kept(log) == ["cmpl-2", "cmpl-3"]
    log = DecisionLog(100, MIB)
    small, large = a_placement((a_row(0),)), a_placement((a_row(0),) * 1500)
    for number, placement in enumerate((small, large, large)):
        record(log, number, placement)
    assert kept(log) == ["cmpl-0", "cmpl-1", "cmpl-2"]
    record(log, 3, large)
    assert kept(log) == ["cmpl-2", "cmpl-3"]
    record(log, 4, small)
    assert kept(log) == ["cmpl-2", "cmpl-3", "cmpl-4"]


def test_a_decision_over_the_whole_bound_is_not_kept_and_drops_no_other() -> None:
    log = DecisionLog(100, MIB)
    record(log, 0, a_placement((a_row(0),)))
    record(log, 1, a_placement((a_row(0),) * 4000))
    record(log, 2, a_placement((a_row(0),)), reason="x" * MIB)
    assert kept(log) == ["cmpl-0"]


@pytest.mark.parametrize(("n_kept", "kept_bytes"), [(0, MIB), (10, 0)])
def test_a_bound_of_zero_keeps_nothing(n_kept: int, kept_bytes: int) -> None:
    log = DecisionLog(n_kept, kept_bytes)
    record(log, 0, a_placement((a_row(0),)))
    assert kept(log) == [] and log.n_bytes == 0


def group_rows(n_workers: int, n_stages: int) -> list[Estimate]:
    rows: list[Estimate] = []
    for first in range(0, n_workers, n_stages):
        members = (WorkerId("w"),) * n_stages
        stage_s = tuple(first + stage + 0.7 for stage in range(n_stages))
        rows.append(a_row(first, GroupEstimate, group="g", members=members, stage_s=stage_s))
    return rows


@pytest.mark.parametrize("kind", ["prefill", "local", "groups", "long groups"])
@pytest.mark.parametrize("n_workers", [1, 100, 10_000])
def test_the_estimated_bytes_are_no_less_than_what_a_decision_takes(
    kind: str, n_workers: int
) -> None:
    log = DecisionLog(1, 2**30)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        rows = [
            a_row(i, LocalPrefillEstimate if kind == "local" else Estimate)
            for i in range(n_workers)
        ]
        if kind == "groups":
            rows += group_rows(n_workers, min(n_workers, 4))
        if kind == "long groups":
            rows = rows[:8] + group_rows(n_workers, min(n_workers, 256))
        record(log, 0, a_placement(tuple(rows)), reason="r" * 100)
        del rows
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert estimated_bytes(log.decisions[0]) == log.n_bytes
    # The request itself is not the log's, and is small here.
    assert used - 20_000 <= log.n_bytes <= 2 * used + 20_000


def test_the_conductor_keeps_as_many_decisions_as_its_setting_allows() -> None:
    workers = [*(f"prefill-{i}" for i in range(100)), "decode-0"]
    core = Core(*workers, kept_decision_bytes=20_000)
    for number in range(10):
        core.arrive(f"cmpl-{number}")
    found = [decision.request_id for decision in core.conductor.decisions]
    assert 1 <= len(found) < 10
    assert found == [f"cmpl-{number}" for number in range(10 - len(found), 10)]
