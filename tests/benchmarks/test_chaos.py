"""The pure parts of a chaos run: its plan of faults, its judgement of answers, its counts."""

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.chaos.answer_check import End, ReceivedAnswer, Verdict, judge
from benchmarks.chaos.chaos_cluster import (
    CONDUCTORS,
    KVSTORES,
    LINKS,
    RACKS,
    SERVICES,
    TRANSFER_LINKS,
    ChaosCluster,
)
from benchmarks.chaos.fault_driver import FaultDriver
from benchmarks.chaos.fault_plan import KINDS, REDIS, FaultTargets, plan_faults
from benchmarks.chaos.leaks import held_by_conductor, held_by_worker
from benchmarks.chaos.ledger import AskedRequest, ChaosLedger
from tests.nightly import by_day

RIGHT = (5, 9, 2, 7, 7, 1, 8)
TARGETS = FaultTargets(SERVICES, tuple(LINKS), KVSTORES, TRANSFER_LINKS, RACKS)


def done(*tokens: int) -> ReceivedAnswer:
    return ReceivedAnswer(End.DONE, tokens)


def verdict(answer: ReceivedAnswer, *, conductor_was_down: bool = False) -> Verdict:
    return judge(answer, RIGHT, conductor_was_down=conductor_was_down)


@pytest.mark.random_seeds(by_day(5, at_night=50))
def test_a_plan_is_its_seeds_and_has_every_kind_of_fault_that_can_be_tried_in_order(
    seed: int,
) -> None:
    plan = plan_faults(seed, 36000.0, TARGETS, 4.0)
    assert plan == plan_faults(seed, 36000.0, TARGETS, 4.0)
    assert plan != plan_faults(seed + 1, 36000.0, TARGETS, 4.0)
    assert {fault.kind for fault in plan} == set(KINDS)
    assert {fault.target for fault in plan} == {*SERVICES, *LINKS, REDIS, *RACKS}
    times = [fault.at_s for fault in plan]
    assert times == sorted(times) and times[0] > 0 and times[-1] < 36000.0
    fewer = plan_faults(seed, 36000.0, FaultTargets(SERVICES, tuple(LINKS)), 4.0)
    left_out = {"link damaged", "disk full", "disk full at start", "rack killed"}
    assert {fault.kind for fault in fewer} == set(KINDS) - left_out


@pytest.mark.random_seeds(by_day(5, at_night=50))
def test_a_target_has_one_fault_at_a_time(seed: int) -> None:
    until_s: dict[str, float] = defaultdict(float)
    for fault in plan_faults(seed, 3600.0, TARGETS, 1.0):
        for each in fault.members:
            assert fault.at_s >= until_s[each]
            until_s[each] = fault.at_s + fault.lasts_s


@pytest.mark.parametrize("end", [End.DONE, End.CANCELLED, End.ERROR, End.BROKEN, End.SILENT])
def test_wrong_doubled_and_missing_tokens_are_found_however_the_request_ends(end: End) -> None:
    for tokens, expected in (
        ((5, 9, 3, 7, 7, 1, 8), Verdict.WRONG),
        ((5, 9, 2, 7, 7, 1, 9), Verdict.WRONG),
        ((5, 9, 9, 2, 7, 7, 1, 8), Verdict.DOUBLED),
        ((5, 9, 2, 9, 2, 7, 7, 1, 8), Verdict.DOUBLED),
        ((*RIGHT, 4), Verdict.DOUBLED),
        ((5, 2, 7, 7, 1, 8), Verdict.MISSING),
        ((5, 9, 2, 7, 1, 8), Verdict.MISSING),
        ((2, 7, 7, 1, 8), Verdict.MISSING),
    ):
        answer = ReceivedAnswer(end, tokens, code="server_error", message="for a reason")
        assert verdict(answer, conductor_was_down=True) is expected
        assert expected.is_violation


#: Of each answer: its end, its tokens, what is counted, whether its conductor was down.
JUDGED: dict[str, tuple[End, int, int | None, bool, Verdict]] = {
    "complete": (End.DONE, 7, None, False, Verdict.RIGHT),
    "complete, and counted": (End.DONE, 7, 7, False, Verdict.RIGHT),
    "miscounted": (End.DONE, 7, 8, False, Verdict.MISCOUNTED),
    "over too early": (End.DONE, 6, None, False, Verdict.MISSING),
    "cancelled": (End.CANCELLED, 3, None, False, Verdict.CANCELLED),
    "silent": (End.SILENT, 3, None, True, Verdict.SILENT),
    "broken by a dead conductor": (End.BROKEN, 3, None, True, Verdict.BROKEN),
    "broken by none": (End.BROKEN, 3, None, False, Verdict.DROPPED),
}


@pytest.mark.parametrize(("end", "n", "n_counted", "down", "judged"), JUDGED.values(), ids=JUDGED)
def test_an_answer_is_judged_that_is(
    end: End, n: int, n_counted: int | None, down: bool, judged: Verdict
) -> None:
    answer = ReceivedAnswer(end, RIGHT[:n], n_counted=n_counted)
    assert verdict(answer, conductor_was_down=down) is judged
    excused = {Verdict.RIGHT, Verdict.CANCELLED, Verdict.BROKEN}
    assert judged.is_violation == (judged not in excused)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (503, "service_unavailable", Verdict.NAMED),
        (0, "server_error", Verdict.NAMED),
        (400, "harmful_request", Verdict.UNEXPECTED),
        (404, "model_not_found", Verdict.UNEXPECTED),
        (400, "invalid_request_error", Verdict.UNEXPECTED),
        (503, "", Verdict.UNEXPECTED),
    ],
)
def test_an_error_has_a_name_that_faults_explain(status: int, code: str, expected: Verdict) -> None:
    answer = ReceivedAnswer(End.ERROR, status=status, code=code, message="for a reason")
    assert verdict(answer) is expected


def test_the_ledger_has_the_longest_pauses_the_recovery_and_each_violation() -> None:
    ledger = ChaosLedger()

    def ask(number: int, began_s: float, ended_s: float, answer: ReceivedAnswer) -> None:
        asked = AskedRequest(number, "conductor-0", began_s, RIGHT)
        ledger.on_answer(asked, answer, ended_s, conductor_was_down=False)

    ask(1, 0.0, 1.0, done(*RIGHT))
    ask(2, 1.0, 4.5, done(*RIGHT))
    ledger.on_calm(5.0)
    ask(3, 4.0, 6.0, done(*RIGHT))  # it began before the last fault was over
    recovery_so_far_s = ledger.recovery_s
    assert recovery_so_far_s is None
    ask(4, 5.5, 7.0, done(*RIGHT))
    ask(5, 7.0, 7.5, done(5, 9, 3))
    assert (ledger.recovery_s, ledger.longest_pause_s) == (2.0, 3.5)
    assert (ledger.n_requests, ledger.verdicts[Verdict.RIGHT]) == (5, 4)
    (violation,) = ledger.violations
    assert "request 5" in violation and "wrong token" in violation
    for began_s, tokens_s in ((1.0, [2.0, 2.5, 6.0]), (7.0, [10.0]), (11.0, [])):
        ledger.on_stream(began_s, tokens_s)
    assert ledger.longest_stream_pause_s == 3.5


def test_what_a_worker_or_a_conductor_still_holds_is_named() -> None:
    metrics = """
# TYPE halfmoon_pages gauge
halfmoon_pages{state="free"} 7.0
halfmoon_pages{state="used"} 0.0
halfmoon_pages{state="landing"} 2.0
# TYPE halfmoon_kvstore_leased_blocks gauge
halfmoon_kvstore_leased_blocks 0.0
# TYPE halfmoon_kvstore_capacity_blocks gauge
halfmoon_kvstore_capacity_blocks{tier="memory"} 8.0
halfmoon_kvstore_capacity_blocks{tier="disk"} 32.0
# TYPE halfmoon_kvstore_disk_off gauge
halfmoon_kvstore_disk_off 0.0
"""
    assert held_by_worker("decode-0", metrics) == ["decode-0 has 2 of halfmoon_pages{landing}"]
    without_disk = metrics.replace('disk"} 32', 'disk"} 0').replace("off 0", "off 1")
    assert held_by_worker("kvstore-0", without_disk)[1:] == [
        "kvstore-0 does not use its disk",
        "kvstore-0 has 1 of halfmoon_kvstore_disk_off",
    ]
    cluster = {"requests": {"waiting": 0, "decoding": 3}}
    assert held_by_conductor("conductor-1", cluster) == ["conductor-1 has 3 requests decoding"]


def test_links_are_those_of_a_service_and_those_between_two_that_speak_to_each_other() -> None:
    for link, ends, has in (
        ("decode-0/all", ("conductor-1", "decode-0"), True),
        ("decode-0/all", ("decode-0", "kvstore-1"), True),
        ("decode-0/all", ("conductor-1", "decode-1"), False),
        ("prefill-1/decode-0", ("prefill-1", "decode-0"), True),
        ("prefill-1/decode-0", ("decode-0", "prefill-1"), True),
        ("prefill-1/decode-0", ("prefill-1", "decode-1"), False),
        ("prefill-1/decode-0", ("decode-0", "decode-0"), False),
    ):
        assert LINKS[link].has(*ends) == has, (link, ends)
    assert "/".join(CONDUCTORS) not in LINKS


async def test_a_run_that_is_ended_early_begins_no_further_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", "")  # the cluster sets it
    cluster = ChaosCluster(tmp_path, tmp_path, "tcp", has_key=False, seed=7)
    ledger = ChaosLedger()
    driver = FaultDriver(cluster, ledger, print)
    faults = plan_faults(7, 3600.0, FaultTargets(SERVICES), 6.0)
    began_s = cluster.now_s() + 3600.0
    run = asyncio.create_task(driver.run(faults, began_s))
    await asyncio.sleep(0)
    driver.end_early()
    await asyncio.wait_for(run, 60)
    assert not ledger.faults
